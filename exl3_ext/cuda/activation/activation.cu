// y = act(gate) * up.
// Work split: 8 columns a thread. Bound: bytes. Chosen: where the activation is not fused.
#include <cuda_runtime.h>

#include "cuda/common/vector.cuh"
#include "exl3/activation.h"

namespace exl3 {
namespace {

using namespace cuda;

constexpr int kThreads = 256;

__device__ __forceinline__ float act(float v, Activation kind) {
  switch (kind) {
    case Activation::kSilu:
      return v / (1.0f + expf(-v));
    case Activation::kGelu:
      return 0.5f * v * (1.0f + erff(v * 0.70710678f));
    case Activation::kGeluTanh:
      return 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
    default:
      return v != v ? v : fmaxf(v, 0.0f);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gate_kernel(const T* x, T* y, int64_t dim, int64_t x_stride, Activation kind) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVector;
  if (at >= dim) return;
  const T* gate = x + blockIdx.y * x_stride;
  float g[kVector], u[kVector];
  load_part(gate, at, dim, wide_rows(x, x_stride), g);
  load_part(gate + dim, at, dim, wide_rows(x + dim, x_stride), u);
#pragma unroll
  for (int i = 0; i < kVector; ++i) g[i] = act(g[i], kind) * u[i];
  store_part(y + blockIdx.y * dim, at, dim, wide_rows(y, dim), g);
}

}  // namespace

template <class T>
Status gated_activation_cuda(const GatedActivation<T>& p, CudaStream stream) {
  using V = typename DeviceType<T>::type;
  constexpr int64_t kMostRows = 65535;  // of a grid's second dim
  const int64_t columns = (p.dim + kThreads * kVector - 1) / (kThreads * kVector);
  for (int64_t row = 0; row < p.rows && columns > 0; row += kMostRows) {
    const int64_t rows = p.rows - row < kMostRows ? p.rows - row : kMostRows;
    const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(rows));
    gate_kernel<V><<<grid, kThreads, 0, stream>>>(
        reinterpret_cast<const V*>(p.gate_up) + row * p.x_stride,
        reinterpret_cast<V*>(p.y) + row * p.dim, p.dim, p.x_stride, p.kind);
  }
  return launch_status();
}

template Status gated_activation_cuda<float>(const GatedActivation<float>&, CudaStream);
template Status gated_activation_cuda<half_bits>(const GatedActivation<half_bits>&, CudaStream);

}  // namespace exl3
