// y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), per row.
// Work split: one block a row, 8 values a thread at a time; the row is read twice, the second time
// from the cache. Bound: bytes, and the latency of one row. Chosen: where the norm is not fused.
#include <cuda_runtime.h>

#include "cuda/common/vector.cuh"
#include "exl3/norm.h"

namespace exl3 {
namespace {

using namespace cuda;

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads)
    norm_kernel(const T* x, const float* weight, T* y, int64_t dim, int64_t x_stride, float eps,
                float offset) {
  __shared__ float room[kThreads / kWarp];
  const T* from = x + blockIdx.x * x_stride;
  T* to = y + blockIdx.x * dim;
  const bool wide_in = wide_rows(x, x_stride), wide_out = wide_rows(y, dim);
  const bool wide_weight = wide_rows(weight, dim);
  float v[kVector], sum = 0.0f;
  for (int64_t at = threadIdx.x * kVector; at < dim; at += kThreads * kVector) {
    load_part(from, at, dim, wide_in, v);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = fmaf(v[i], v[i], sum);
  }
  sum = sum_of_block(sum, room);
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(dim) + eps);
  for (int64_t at = threadIdx.x * kVector; at < dim; at += kThreads * kVector) {
    load_part(from, at, dim, wide_in, v);
    if (weight) {
      float w[kVector];
      load_part(weight, at, dim, wide_weight, w);
#pragma unroll
      for (int i = 0; i < kVector; ++i) v[i] *= w[i] + offset;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) v[i] *= scale;
    store_part(to, at, dim, wide_out, v);
  }
}

}  // namespace

template <class T>
Status rms_norm_cuda(const RmsNorm<T>& p, CudaStream stream) {
  if (p.rows == 0 || p.dim == 0) return Status::kOk;
  using V = typename DeviceType<T>::type;
  norm_kernel<V><<<static_cast<unsigned>(p.rows), kThreads, 0, stream>>>(
      reinterpret_cast<const V*>(p.x), p.weight, reinterpret_cast<V*>(p.y), p.dim, p.x_stride,
      p.eps, p.weight_offset);
  return launch_status();
}

template Status rms_norm_cuda<float>(const RmsNorm<float>&, CudaStream);
template Status rms_norm_cuda<half_bits>(const RmsNorm<half_bits>&, CudaStream);

}  // namespace exl3
