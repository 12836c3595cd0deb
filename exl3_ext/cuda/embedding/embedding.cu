// y[i] = table[ids[i]] * scale; a row of NaN for an id outside the table.
// Work split: one block a row. Bound: latency in decode, bytes in prefill.
#include <cuda_runtime.h>

#include "cuda/common/vector.cuh"
#include "exl3/embedding.h"

namespace exl3 {
namespace {

using namespace cuda;

constexpr int kThreads = 256;

template <class In, class T>
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const int64_t* ids, const In* table, T* y, int64_t vocab, int64_t dim,
                     float scale) {
  const int64_t id = ids[blockIdx.x];
  const bool known = id >= 0 && id < vocab;
  const In* from = table + (known ? id : 0) * dim;
  T* to = y + blockIdx.x * dim;
  const bool wide_in = wide_rows(table, dim), wide_out = wide_rows(y, dim);
  const float factor = known ? scale : __int_as_float(0x7FFFFFFF);
  for (int64_t at = threadIdx.x * kVector; at < dim; at += kThreads * kVector) {
    float v[kVector] = {};
    if (known) load_part(from, at, dim, wide_in, v);
#pragma unroll
    for (int i = 0; i < kVector; ++i) v[i] *= factor;
    store_part(to, at, dim, wide_out, v);
  }
}

template <class In, class T>
void start(const Embedding<T>& p, CudaStream stream) {
  using V = typename DeviceType<T>::type;
  embedding_kernel<In, V><<<static_cast<unsigned>(p.rows), kThreads, 0, stream>>>(
      p.ids, static_cast<const In*>(p.table), reinterpret_cast<V*>(p.y), p.vocab, p.dim, p.scale);
}

}  // namespace

template <class T>
Status embedding_cuda(const Embedding<T>& p, CudaStream stream) {
  if (p.rows == 0 || p.dim == 0) return Status::kOk;
  switch (p.dtype) {
    case DType::kFloat32:
      start<float>(p, stream);
      break;
    case DType::kFloat16:
      start<__half>(p, stream);
      break;
    case DType::kBFloat16:
      start<__nv_bfloat16>(p, stream);
      break;
  }
  return launch_status();
}

template Status embedding_cuda<float>(const Embedding<float>&, CudaStream);
template Status embedding_cuda<half_bits>(const Embedding<half_bits>&, CudaStream);

}  // namespace exl3
