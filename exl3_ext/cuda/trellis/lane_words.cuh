// A lane's part of a group of four tiles (lane words, exl3/trellis.h), or of half a group, and the
// states in it.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/math.cuh"

namespace exl3::cuda {

template <int kBits, int kTiles = 4>
struct LaneWords {
  static constexpr int kVector = kBits % 4 == 0 ? 4 : kBits % 2 == 0 ? 2 : 1;
  static constexpr int kWords = (kBits * kTiles + 3) / 4;
  uint32_t w[kWords];

  // `row`: the 32*kBits words of a group at one step of 16 inputs, in any memory.
  __device__ __forceinline__ void load(const uint32_t* row, int lane) {
#pragma unroll
    for (int c = 0; c < kBits / kVector; ++c) {
      const uint32_t* at = row + (c * kWarp + lane) * kVector;
      if constexpr (kVector == 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(at);
        w[4 * c] = v.x, w[4 * c + 1] = v.y, w[4 * c + 2] = v.z, w[4 * c + 3] = v.w;
      } else if constexpr (kVector == 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(at);
        w[2 * c] = v.x, w[2 * c + 1] = v.y;
      } else {
        w[c] = *at;
      }
    }
  }

  // Tiles 2*half and 2*half + 1 (kTiles is 2), in shared memory.
  __device__ __forceinline__ void load_half(const uint32_t* row, int lane, int half) {
    static_assert(kTiles == 2);
    if constexpr (kBits == 4) {
      const uint2 v = *reinterpret_cast<const uint2*>(row + lane * 4 + half * 2);
      w[0] = v.x, w[1] = v.y;
    } else if constexpr (kBits == 8) {
      const uint4 v = *reinterpret_cast<const uint4*>(row + (half * kWarp + lane) * 4);
      w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    } else {
      const int first = kBits * half / 2;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        w[i] = row[((first + i) / kVector * kWarp + lane) * kVector + (first + i) % kVector];
      }
      if constexpr (kBits % 2 == 1) {  // the second half starts inside a word
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          w[i] = __funnelshift_l(i + 1 < kWords ? w[i + 1] : 0u, w[i], 16 * half);
        }
      }
    }
  }

  // 32 bits of this lane that start at bit `at`, 0 <= at <= 8*kTiles*kBits - 32; `at` is a constant
  // after unrolling.
  __device__ __forceinline__ uint32_t window(int at) const {
    const int i = at / 32, s = at % 32;
    return s == 0 ? w[i] : __funnelshift_l(w[i + 1 < kWords ? i + 1 : i], w[i], s);
  }
  __device__ __forceinline__ uint32_t window_or_shift(int at) const {
    return at >= 0 ? window(at) : w[0] >> (-at);
  }

  // The 8*kBits bits of tile q, right-aligned: lo, and hi for more than 32.
  __device__ __forceinline__ void tile(int q, uint32_t& lo, uint32_t& hi) const {
    constexpr int kTile = 8 * kBits;
    const int end = kTile * (q + 1);
    lo = end % 32 == 0 ? w[end / 32 - 1] : window_or_shift(end - 32);
    hi = 0;
    if constexpr (kTile < 32) {
      lo &= (1u << kTile) - 1;
    } else if constexpr (kTile > 32) {
      hi = window_or_shift(end - 64);
      if constexpr (kTile < 64) hi &= (1u << (kTile - 32)) - 1;
    }
  }

  // The tile's bits with those of the lanes before above them, as words from the lowest.
  __device__ __forceinline__ void stream(int q, uint32_t (&v)[4]) const {
    constexpr int kTile = 8 * kBits;
    uint32_t lo, hi;
    tile(q, lo, hi);
    const int lane = threadIdx.x & (kWarp - 1);
    const uint32_t before = __shfl_sync(0xFFFFFFFFu, lo, (lane + kWarp - 1) & (kWarp - 1));
    v[0] = lo, v[1] = hi, v[2] = v[3] = 0;
    if constexpr (kBits == 1) {
      const uint32_t further = __shfl_sync(0xFFFFFFFFu, lo, (lane + kWarp - 2) & (kWarp - 1));
      v[0] |= (before << 8) | (further << 16);
    } else if constexpr (kTile % 32 == 0) {
      v[kTile / 32] = before;
    } else {
      v[kTile / 32] |= before << (kTile % 32);
      v[kTile / 32 + 1] = before >> (32 - kTile % 32);
    }
  }

  // The eight states of tile q in bits 0..15; the bits above are not cleared.
  __device__ __forceinline__ void states(int q, uint32_t (&s)[8]) const {
    uint32_t v[4];
    stream(q, v);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int shift = kBits * (7 - e);  // the state's lowest bit
      const int i = shift / 32, r = shift % 32;
      s[e] = r == 0 ? v[i] : r <= 16 ? v[i] >> r : __funnelshift_r(v[i], v[i + 1], r);
    }
  }
};

}  // namespace exl3::cuda
