// The inner products of a warp: 64 outputs by its steps of 16 inputs.
//
// mul1: a weight is a*(1024 + b0+b1+b2+b3) + c with b the bytes of x = state * C, so 16 inputs are
// an unsigned-by-signed byte dot product in which each activation stands four times over. The word
// x is one register of an A fragment (16 outputs by 32 bytes). An activation is 256*high + low: two
// columns of the B fragment a row, four rows a fragment.
// 3inst, mcg: float16 weights are the A fragment of m16n8k16 as they come; eight rows a fragment.
#pragma once
#include <cuda_fp16.h>

#include "cuda/common/mma.cuh"
#include "cuda/gemv/input.cuh"
#include "cuda/trellis/lane_words.cuh"
#include "exl3/codebook.h"

namespace exl3::cuda {

// x of the eight states of tile q. At 4 bits both halves of a 32-bit window are states; some low
// halves go through the multiplier (v*C - ((v >> 16)*C << 16)) since masks and shifts are the
// bound.
template <int kBits>
static __device__ __forceinline__ void mul1_words(const LaneWords<kBits>& words, int q,
                                                  uint32_t (&x)[8]) {
  if constexpr (kBits == 4) {
    uint32_t v[4];
    words.stream(q, v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = i == 0 ? v[0] : __funnelshift_r(v[0], v[1], 4 * i);
      const uint32_t high = (pair >> 16) * kMul1Mul;
      x[3 - i] = high;
      if (i < 2) {
        asm("{ .reg .u32 t; mul.lo.u32 t, %1, %2; mad.lo.u32 %0, %3, 0xFFFF0000, t; }"
            : "=r"(x[7 - i])
            : "r"(pair), "r"(kMul1Mul), "r"(high));
      } else {
        x[7 - i] = (pair & 0xFFFFu) * kMul1Mul;
      }
    }
  } else {
    words.states(q, x);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = (x[e] & 0xFFFFu) * kMul1Mul;
  }
}

// The eight float16 weights of tile q in pairs. A state's x is state * multiplier + increment.
template <int kBits>
static __device__ __forceinline__ void half_words(const LaneWords<kBits>& words, int q,
                                                  uint32_t multiplier, uint32_t increment,
                                                  uint32_t (&w)[4]) {
  uint32_t s[8];
  words.states(q, s);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    s[e] = (((s[e] & 0xFFFFu) * multiplier + increment) & kHalfPairMask) ^ kHalfPairXor;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = __byte_perm(s[2 * i], s[2 * i + 1], 0x5410);
    const uint32_t high = __byte_perm(s[2 * i], s[2 * i + 1], 0x7632);
    const __half2 sum =
        __hadd2(*reinterpret_cast<const __half2*>(&low), *reinterpret_cast<const __half2*>(&high));
    w[i] = *reinterpret_cast<const uint32_t*>(&sum);
  }
}

template <int kBits, int kFragments>
struct IntegerProduct {
  using Input = IntegerInput<kFragments>;
  int c[4][kFragments][4] = {};

  __device__ __forceinline__ void step(const LaneWords<kBits>& words, const uint32_t* activations,
                                       uint32_t, uint32_t) {
    const int lane = threadIdx.x & (kWarp - 1);
    uint32_t b[kFragments][4];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const uint32_t word = activations[f * kWarp + lane];
      b[f][0] = __byte_perm(word, 0, 0x0000);
      b[f][1] = __byte_perm(word, 0, 0x1111);
      b[f][2] = __byte_perm(word, 0, 0x2222);
      b[f][3] = __byte_perm(word, 0, 0x3333);
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t x[8];
      mul1_words(words, q, x);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        mma_u8s8(c[q][f], x[0], x[4], x[1], x[5], b[f][0], b[f][1]);
        mma_u8s8(c[q][f], x[2], x[6], x[3], x[7], b[f][2], b[f][3]);
      }
    }
  }

  // Scaled sums to sums[row * kGemvSumPitch + output of the 64].
  __device__ __forceinline__ void emit(float* sums, int rows, const float* scale) const {
    const int lane = threadIdx.x & (kWarp - 1);
    const float a = __half2float(__ushort_as_half(kMul1ScaleBits));
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const int row = 4 * f + (lane & 3);
      if (row >= rows) continue;
      const float factor = scale[row] * a;
      float* to = sums + row * kGemvSumPitch + (lane >> 2);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float high = static_cast<float>(c[q][f][2 * h + 1]);
          to[q * kTileDim + 8 * h] =
              factor * fmaf(256.0f, high, static_cast<float>(c[q][f][2 * h]));
        }
      }
    }
  }
};

template <int kBits, int kFragments>
struct HalfProduct {
  using Input = HalfInput<kFragments>;
  float c[4][kFragments][4] = {};

  __device__ __forceinline__ void step(const LaneWords<kBits>& words, const uint32_t* activations,
                                       uint32_t multiplier, uint32_t increment) {
    const int lane = threadIdx.x & (kWarp - 1);
    uint2 b[kFragments];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      b[f] = *reinterpret_cast<const uint2*>(activations + (f * kWarp + lane) * 2);
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t w[4];
      half_words(words, q, multiplier, increment, w);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) mma_f16(c[q][f], w[0], w[2], w[1], w[3], b[f].x, b[f].y);
    }
  }

  __device__ __forceinline__ void emit(float* sums, int rows, const float* scale) const {
    const int lane = threadIdx.x & (kWarp - 1);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * f + 2 * (lane & 3) + i;
        if (row >= rows) continue;
        float* to = sums + row * kGemvSumPitch + (lane >> 2);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          to[q * kTileDim] = scale[row] * c[q][f][i];
          to[q * kTileDim + 8] = scale[row] * c[q][f][2 + i];
        }
      }
    }
  }
};

}  // namespace exl3::cuda
