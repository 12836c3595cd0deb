// Sums and extremes of integers over a warp: one instruction from compute capability 8.0 on.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace exl3::cuda {

static __device__ __forceinline__ int warp_sum(int v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(0xFFFFFFFFu, v);
#else
  for (int h = 16; h; h /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, h);
  return v;
#endif
}

static __device__ __forceinline__ uint32_t warp_max(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xFFFFFFFFu, v);
#else
  for (int h = 16; h; h /= 2) v = max(v, __shfl_xor_sync(0xFFFFFFFFu, v, h));
  return v;
#endif
}

static __device__ __forceinline__ int warp_min(int v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(0xFFFFFFFFu, v);
#else
  for (int h = 16; h; h /= 2) v = min(v, __shfl_xor_sync(0xFFFFFFFFu, v, h));
  return v;
#endif
}

}  // namespace exl3::cuda
