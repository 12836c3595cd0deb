#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

enum class Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3 };
constexpr int kActivations = 4;

// y = act(gate) * up.
//
// T: float, or half_bits on CUDA; the CPU has float32 activations only.
template <class T>
struct GatedActivation {
  const T* gate_up;  // [rows, 2 * dim]: gate, then up; rows x_stride apart
  T* y;              // [rows, dim] row-major
  int64_t rows, dim, x_stride;
  Activation kind;
};
using GatedActivationParams = GatedActivation<float>;

Status gated_activation_cpu(const GatedActivationParams& p);
template <class T>
Status gated_activation_cuda(const GatedActivation<T>& p, CudaStream stream);

}  // namespace exl3
