// Eight neighbouring values at once, and sums over a warp or block.
#pragma once
#include "cuda/common/math.cuh"
#include "exl3/status.h"

namespace exl3::cuda {

template <class T>
struct DeviceType {
  using type = T;
};
template <>
struct DeviceType<half_bits> {
  using type = __half;
};

constexpr int kVector = 8;

// True if rows of `stride` values from `data` on start at multiples of 16 bytes.
template <class T>
static __device__ __forceinline__ bool wide_rows(const T* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % (16 / sizeof(T)) == 0;
}

static __device__ __forceinline__ void load8(const __half* from, float (&v)[kVector]) {
  const uint4 u = *reinterpret_cast<const uint4*>(from);
  const __half2* h = reinterpret_cast<const __half2*>(&u);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = __half22float2(h[i]);
    v[2 * i] = f.x;
    v[2 * i + 1] = f.y;
  }
}

static __device__ __forceinline__ void load8(const __nv_bfloat16* from, float (&v)[kVector]) {
  const uint4 u = *reinterpret_cast<const uint4*>(from);
  const uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = __uint_as_float(w[i] << 16);
    v[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
  }
}

static __device__ __forceinline__ void load8(const float* from, float (&v)[kVector]) {
  const float4 a = reinterpret_cast<const float4*>(from)[0];
  const float4 b = reinterpret_cast<const float4*>(from)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

static __device__ __forceinline__ void store8(__half* to, const float (&v)[kVector]) {
  uint4 u;
  __half2* h = reinterpret_cast<__half2*>(&u);
#pragma unroll
  for (int i = 0; i < 4; ++i) h[i] = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = u;
}

static __device__ __forceinline__ void store8(float* to, const float (&v)[kVector]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

// Values at..at+7 of a row of `count`; those past the end are 0.
template <class T>
static __device__ __forceinline__ void load_part(const T* row, int64_t at, int64_t count, bool wide,
                                                 float (&v)[kVector]) {
  if (wide && at + kVector <= count) {
    load8(row + at, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) v[i] = at + i < count ? to_float<T>(row[at + i]) : 0.0f;
}

template <class T>
static __device__ __forceinline__ void store_part(T* row, int64_t at, int64_t count, bool wide,
                                                  const float (&v)[kVector]) {
  if (wide && at + kVector <= count) {
    store8(row + at, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (at + i < count) row[at + i] = from_float<T>(v[i]);
  }
}

static __device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int h = kWarp / 2; h; h /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, h);
  return v;
}

// Sum over the block, for every thread; `room` holds a float for each warp.
static __device__ __forceinline__ float sum_of_block(float v, float* room) {
  v = sum_of_warp(v);
  if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = v;
  __syncthreads();
  float sum = 0.0f;
  for (unsigned i = 0; i < blockDim.x / kWarp; ++i) sum += room[i];
  return sum;
}

static inline Status launch_status() {
  return cudaPeekAtLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

}  // namespace exl3::cuda
