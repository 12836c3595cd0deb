// Values of matrices whose dtype is known at run time, sums over a warp, activations.
#pragma once
#include "cuda/common/math.cuh"
#include "exl3/linear_cuda.h"

namespace exl3::cuda {

static __device__ __forceinline__ float load_value(const void* data, DType type, int64_t at) {
  switch (type) {
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(data)[at]);
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

static __device__ __forceinline__ void store_value(void* data, DType type, int64_t at, float v) {
  switch (type) {
    case DType::kFloat16:
      static_cast<__half*>(data)[at] = __float2half_rn(v);
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(v);
      break;
    default:
      static_cast<float*>(data)[at] = v;
  }
}

// `count` (0..4) values from `at` on, `at` a multiple of 4; the rest are 0. One wide load where the
// address allows it.
static __device__ __forceinline__ void load4(const void* data, DType type, int64_t at, int count,
                                             float (&v)[4]) {
  const int size = type == DType::kFloat32 ? 4 : 2;
  const char* from = static_cast<const char*>(data) + at * size;
  if (count == 4 && reinterpret_cast<uintptr_t>(from) % (4 * size) == 0) {
    if (type == DType::kFloat32) {
      const float4 f = *reinterpret_cast<const float4*>(from);
      v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
      return;
    }
    const uint2 u = *reinterpret_cast<const uint2*>(from);
    const uint32_t h[4] = {u.x & 0xFFFFu, u.x >> 16, u.y & 0xFFFFu, u.y >> 16};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = type == DType::kFloat16
                 ? __half2float(__ushort_as_half(static_cast<unsigned short>(h[i])))
                 : __uint_as_float(h[i] << 16);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = i < count ? load_value(data, type, at + i) : 0.0f;
}

static __device__ __forceinline__ float half_value(half_bits bits) {
  return __half2float(__ushort_as_half(bits));
}

static __device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int h = kWarp / 2; h; h /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, h);
  return v;
}

static __device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int h = kWarp / 2; h; h /= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, h));
  return v;
}

// Kinds as in LinearGroup.
static __device__ __forceinline__ float activate(float v, int kind) {
  switch (kind) {
    case 0:
      return v / (1.0f + __expf(-v));
    case 1:
      return 0.5f * v * (1.0f + erff(v * 0.70710678f));
    case 2:
      return 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
    default:
      return v != v ? v : fmaxf(v, 0.0f);
  }
}

}  // namespace exl3::cuda
