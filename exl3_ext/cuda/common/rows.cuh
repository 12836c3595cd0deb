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

// Four neighbouring values as they were loaded: 4 floats, or 4 halves in x and y. Apart from their
// conversion, so that several loads can be in flight.
static __device__ __forceinline__ uint4 load_raw4(const void* data, DType type, int64_t at,
                                                  int count) {
  const int size = type == DType::kFloat32 ? 4 : 2;
  const char* from = static_cast<const char*>(data) + at * size;
  uint4 raw{};
  if (count == 4 && reinterpret_cast<uintptr_t>(from) % (4 * size) == 0) {
    if (size == 4) {
      raw = *reinterpret_cast<const uint4*>(from);
    } else {
      const uint2 u = *reinterpret_cast<const uint2*>(from);
      raw.x = u.x, raw.y = u.y;
    }
  } else if (size == 4) {
    const auto* word = reinterpret_cast<const uint32_t*>(from);
    if (count > 0) raw.x = word[0];
    if (count > 1) raw.y = word[1];
    if (count > 2) raw.z = word[2];
    if (count > 3) raw.w = word[3];
  } else {
    const auto* half = reinterpret_cast<const uint16_t*>(from);
    if (count > 0) raw.x = half[0];
    if (count > 1) raw.x |= static_cast<uint32_t>(half[1]) << 16;
    if (count > 2) raw.y = half[2];
    if (count > 3) raw.y |= static_cast<uint32_t>(half[3]) << 16;
  }
  return raw;
}

static __device__ __forceinline__ void convert4(const uint4& raw, DType type, float (&v)[4]) {
  if (type == DType::kFloat32) {
    v[0] = __uint_as_float(raw.x), v[1] = __uint_as_float(raw.y);
    v[2] = __uint_as_float(raw.z), v[3] = __uint_as_float(raw.w);
  } else if (type == DType::kFloat16) {
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
    const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
    v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
  } else {
    v[0] = __uint_as_float(raw.x << 16), v[1] = __uint_as_float(raw.x & 0xFFFF0000u);
    v[2] = __uint_as_float(raw.y << 16), v[3] = __uint_as_float(raw.y & 0xFFFF0000u);
  }
}

// `count` (0..4) values from `at` on; the rest are 0. One wide load where the address allows it.
static __device__ __forceinline__ void load4(const void* data, DType type, int64_t at, int count,
                                             float (&v)[4]) {
  convert4(load_raw4(data, type, at, count), type, v);
}

// The first `count` of four values, at once where the address allows it.
static __device__ __forceinline__ void store4(void* data, DType type, int64_t at, int count,
                                              const float (&v)[4]) {
  char* to = static_cast<char*>(data) + at * (type == DType::kFloat32 ? 4 : 2);
  if (count == 4 && type == DType::kFloat16 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    const __half2 pair[2] = {__floats2half2_rn(v[0], v[1]), __floats2half2_rn(v[2], v[3])};
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pair);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) store_value(data, type, at + i, v[i]);
  }
}

// How many of the four values from `column` on are inside a row of `columns`.
static __device__ __forceinline__ int count4(int64_t column, int64_t columns) {
  const int64_t left = columns - column;
  return left >= 4 ? 4 : left > 0 ? static_cast<int>(left) : 0;
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
