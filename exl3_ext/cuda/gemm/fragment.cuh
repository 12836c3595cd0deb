// A tile of 16 inputs by 16 outputs as a float16 A fragment (outputs are its rows): exact weights.
//
//   register   outputs      inputs
//   0 / 2      t/4          2q, 2q+1 / 2q+8, 2q+9      t lane, q = t mod 4
//   1 / 3      t/4 + 8      the same
#pragma once
#include <cuda_fp16.h>

#include "cuda/trellis/lane_words.cuh"
#include "exl3/codebook.h"

namespace exl3::cuda {

// Bits of the float16 1024 + byte sum of x = state * C.
static __device__ __forceinline__ uint32_t mul1_half(uint32_t x) {
  constexpr uint32_t kHalf1024 = 0x6400;
  return __dp4a(x, 0x01010101u, kHalf1024);
}

static __device__ __forceinline__ uint32_t mul1_pair(uint32_t first, uint32_t second) {
  const uint32_t both = __byte_perm(mul1_half(first), mul1_half(second), 0x5410);
  const __half2 a = __half2half2(__ushort_as_half(kMul1ScaleBits));
  const __half2 c = __half2half2(__ushort_as_half(kMul1OffsetBits));
  const __half2 w = __hfma2(*reinterpret_cast<const __half2*>(&both), a, c);
  return *reinterpret_cast<const uint32_t*>(&w);
}

// The other codebooks: weights of two half pairs.
static __device__ __forceinline__ uint32_t sum_pair(uint32_t first, uint32_t second) {
  const uint32_t low = __byte_perm(first, second, 0x5410);
  const uint32_t high = __byte_perm(first, second, 0x7632);
  const __half2 w =
      __hadd2(*reinterpret_cast<const __half2*>(&low), *reinterpret_cast<const __half2*>(&high));
  return *reinterpret_cast<const uint32_t*>(&w);
}

// x = state * C of the eight states of tile q. At 4 bits both halves of a 32-bit window are states.
template <int kBits, int kTiles>
static __device__ __forceinline__ void mul1_products(const LaneWords<kBits, kTiles>& words, int q,
                                                     uint32_t (&x)[8]) {
  if constexpr (kBits == 4) {
    uint32_t v[4];
    words.stream(q, v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = i == 0 ? v[0] : __funnelshift_r(v[0], v[1], 4 * i);
      x[3 - i] = (pair >> 16) * kMul1Mul;
      x[7 - i] = (pair & 0xFFFFu) * kMul1Mul;
    }
  } else {
    words.states(q, x);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = (x[e] & 0xFFFFu) * kMul1Mul;
  }
}

// For codebooks other than mul1, x = state * multiplier + increment.
template <int kBits, int kTiles, bool kMul1>
static __device__ __forceinline__ void tile_fragment(const LaneWords<kBits, kTiles>& words, int q,
                                                     uint32_t multiplier, uint32_t increment,
                                                     uint32_t (&a)[4]) {
  uint32_t x[8];
  if constexpr (kMul1) {
    mul1_products(words, q, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[(i & 1) * 2 + (i >> 1)] = mul1_pair(x[2 * i], x[2 * i + 1]);
  } else {
    words.states(q, x);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      x[e] = (((x[e] & 0xFFFFu) * multiplier + increment) & kHalfPairMask) ^ kHalfPairXor;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) a[(i & 1) * 2 + (i >> 1)] = sum_pair(x[2 * i], x[2 * i + 1]);
  }
}

}  // namespace exl3::cuda
