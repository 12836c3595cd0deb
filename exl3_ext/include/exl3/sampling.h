#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

// index[i] = the lowest column < valid with the greatest value of row i. NaN is less than all else;
// a row of nothing but NaN gives 0.
//
// T: float, or half_bits on CUDA; the CPU has float32 activations only.
template <class T>
struct Argmax {
  const T* x;      // [rows, >= valid], rows x_stride apart
  int64_t* index;  // [rows]
  int64_t rows, valid, x_stride;
};
using ArgmaxParams = Argmax<float>;

Status argmax_cpu(const ArgmaxParams& p);
template <class T>
Status argmax_cuda(const Argmax<T>& p, CudaStream stream);

}  // namespace exl3
