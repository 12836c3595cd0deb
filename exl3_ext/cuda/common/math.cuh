// Device helpers shared by kernels.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "exl3/types.h"

namespace exl3::cuda {

constexpr int kWarp = 32;
constexpr float kHadamardNorm = 0.08838834764831845f;  // 1 / sqrt(128)

template <class T>
static __device__ __forceinline__ float to_float(T v);
template <>
__device__ __forceinline__ float to_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ float to_float<__half>(__half v) {
  return __half2float(v);
}
template <>
__device__ __forceinline__ float to_float<__nv_bfloat16>(__nv_bfloat16 v) {
  return __bfloat162float(v);
}

template <class T>
static __device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// 128 values over one warp, lane l holding 4l..4l+3: unnormalised Hadamard transform in place.
static __device__ __forceinline__ void warp_hadamard_128(float (&v)[4]) {
  const int lane = threadIdx.x & (kWarp - 1);
  const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
  v[0] = a + c;
  v[1] = b + d;
  v[2] = a - c;
  v[3] = b - d;
#pragma unroll
  for (int h = 1; h < kWarp; h *= 2) {
    const float sign = (lane & h) ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xFFFFFFFFu, v[i], h));
    }
  }
}

}  // namespace exl3::cuda
