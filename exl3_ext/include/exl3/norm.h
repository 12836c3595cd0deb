#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

// y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), per row.
//
// T: float, or half_bits on CUDA; the CPU has float32 activations only.
template <class T>
struct RmsNorm {
  const T* x;           // [rows, dim], rows x_stride apart
  const float* weight;  // [dim] or null for 1 (weight_offset is then not added)
  T* y;                 // [rows, dim] row-major
  int64_t rows, dim, x_stride;
  float eps, weight_offset;
};
using RmsNormParams = RmsNorm<float>;

Status rms_norm_cpu(const RmsNormParams& p);
template <class T>
Status rms_norm_cuda(const RmsNorm<T>& p, CudaStream stream);

}  // namespace exl3
