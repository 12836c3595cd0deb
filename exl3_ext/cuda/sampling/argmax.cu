// index[i] = the lowest column < valid with the greatest value of row i; NaN is less than all else.
// Work split: one block of 1024 threads a row, 8 columns a thread at a time. Bound: what one
// multiprocessor reads.
#include <cuda_runtime.h>

#include "cuda/common/vector.cuh"
#include "exl3/sampling.h"

namespace exl3 {
namespace {

using namespace cuda;

constexpr int kThreads = 1024;
constexpr unsigned kNoColumn = 0xFFFFFFFFu;

// Order of values as unsigned numbers, NaN lowest; ties go to the lower column.
struct Best {
  unsigned rank = 0;
  unsigned column = kNoColumn;
};

__device__ __forceinline__ unsigned rank_of(float v) {
  if (v != v) return 0;
  const unsigned bits = __float_as_uint(v + 0.0f);  // -0 becomes 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ Best better(Best a, Best b) {
  const bool second = b.rank > a.rank || (b.rank == a.rank && b.column < a.column);
  return second ? b : a;
}

__device__ __forceinline__ Best best_of_warp(Best best) {
#pragma unroll
  for (int h = kWarp / 2; h; h /= 2) {
    Best other;
    other.rank = __shfl_xor_sync(0xFFFFFFFFu, best.rank, h);
    other.column = __shfl_xor_sync(0xFFFFFFFFu, best.column, h);
    best = better(best, other);
  }
  return best;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    argmax_kernel(const T* x, int64_t* index, int64_t valid, int64_t x_stride) {
  __shared__ unsigned ranks[kThreads / kWarp], columns[kThreads / kWarp];
  const T* row = x + blockIdx.x * x_stride;
  const bool wide = wide_rows(x, x_stride);
  Best best;
  for (int64_t at = threadIdx.x * kVector; at < valid; at += kThreads * kVector) {
    float v[kVector];
    load_part(row, at, valid, wide, v);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (at + i >= valid) continue;
      Best other;
      other.rank = rank_of(v[i]);
      other.column = static_cast<unsigned>(at + i);
      best = better(best, other);
    }
  }
  best = best_of_warp(best);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (lane == 0) ranks[warp] = best.rank, columns[warp] = best.column;
  __syncthreads();
  if (warp != 0) return;
  best.rank = ranks[lane];
  best.column = columns[lane];
  best = best_of_warp(best);
  if (lane == 0) index[blockIdx.x] = best.column == kNoColumn ? 0 : best.column;
}

}  // namespace

template <class T>
Status argmax_cuda(const Argmax<T>& p, CudaStream stream) {
  if (p.rows == 0) return Status::kOk;
  if (p.valid >= kNoColumn) return Status::kBadArgument;
  using V = typename DeviceType<T>::type;
  argmax_kernel<V><<<static_cast<unsigned>(p.rows), kThreads, 0, stream>>>(
      reinterpret_cast<const V*>(p.x), p.index, p.valid, p.x_stride);
  return launch_status();
}

template Status argmax_cuda<float>(const Argmax<float>&, CudaStream);
template Status argmax_cuda<half_bits>(const Argmax<half_bits>&, CudaStream);

}  // namespace exl3
