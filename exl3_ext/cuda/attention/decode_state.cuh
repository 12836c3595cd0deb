// Softmax and products of one warp over 16 keys at a time, transposed: rows of q are the columns.
//
//   scores^T (16 keys, 8 rows) = K q^T,  out^T (dims, 8 rows) += V^T weights^T
//
// Lane l has rows 2 (l % 4) and the next of every 8, keys or dims l / 4 and l / 4 + 8 of every 16.
// The base of the exponentials is a whole number (in base 2) that is not below any score: so every
// rescaling is a power of two and exact, and sums do not depend on how keys are shared out to
// thread blocks as long as the order of additions stays.
//
// Shared memory: rows of D halves in units of 16 bytes, whose order is changed so that rows fall
// into different banks: in row r unit u of K is at u ^ 4 (r % 2), of V at u ^ (r % 8).
#pragma once
#include "cuda/attention/tiles.cuh"

namespace exl3::cuda {

constexpr int kStepKeys = 16;
constexpr float kLog2Of_e = 1.4426950408889634f;

static __device__ __forceinline__ int k_unit(int row, int unit) { return unit ^ (row % 2 * 4); }
static __device__ __forceinline__ int v_unit(int row, int unit) { return unit ^ (row % 8); }

static __device__ __forceinline__ unsigned transpose_8x8(unsigned v) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(v));
  return y;
}

// 2^(from - to) of whole numbers, exact; from is at most to. 0 for one that saw no key.
static __device__ __forceinline__ float base_factor(float from, float to) {
  const float apart = from - to;
  return apart >= -126.0f ? __int_as_float((127 + static_cast<int>(apart)) << 23) : 0.0f;
}

// Absolute error under 2^-21.
static __device__ __forceinline__ float tanh_fast(float v) {
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(2.0f * kLog2Of_e * v));
}

template <int D, int kTiles>
struct DecodeState {
  uint4 q[kTiles][D / 32];
  float out[kTiles][D / 16][4];
  float base[kTiles][2], sum[kTiles][2];
  int low[kTiles][2], high[kTiles][2];  // keys that a row sees

  // Rows of q [8 * kTiles][D].
  __device__ __forceinline__ void load_rows(const __half* rows) {
    const int row = threadIdx.x % kWarp / 4;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint4* from = reinterpret_cast<const uint4*>(rows + (t * 8 + row) * D);
#pragma unroll
      for (int g = 0; g < D / 32; ++g) q[t][g] = from[k_unit(row, 4 * g + threadIdx.x % 4)];
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[t][n][i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) base[t][i] = -INFINITY, sum[t][i] = 0.0f;
    }
  }

  // Scores in base 2 of the 16 keys from position key0 on, those from `end` on masked.
  __device__ __forceinline__ void scores(float (&s)[kTiles][4], const __half* k, int key0, int end,
                                         float scale, float softcap) const {
    const int lane = threadIdx.x % kWarp, row = lane / 4;
    float more[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[t][i] = more[t][i] = 0.0f;
    }
    // Unit k_unit(row, 4 g + lane % 4), for even and odd g.
    const __half* even = k + row * D + row % 2 * 32 + lane % 4 * 8;
    const __half* odd = k + row * D + (row + 1) % 2 * 32 + lane % 4 * 8;
#pragma unroll
    for (int g = 0; g < D / 32; ++g) {
      const uint4* upper = reinterpret_cast<const uint4*>((g % 2 ? odd : even) + g / 2 * 64);
      const uint4 a = upper[0], b = upper[D];  // 8 rows on
      const unsigned first[4] = {a.x, b.x, a.y, b.y}, second[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        multiply_16x8x16(s[t], first, q[t][g].x, q[t][g].y);
        multiply_16x8x16(more[t], second, q[t][g].z, q[t][g].w);
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[t][i] = (s[t][i] + more[t][i]) * scale;
    }
    if (softcap > 0.0f) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[t][i] = softcap * kLog2Of_e * tanh_fast(s[t][i]);
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = key0 + row + i / 2 * 8, past = min(high[t][i % 2], end);
        if (key < low[t][i % 2] || key >= past) s[t][i] = -INFINITY;
      }
    }
  }

  // Scores become weights; rescales what is there.
  __device__ __forceinline__ void weigh(float (&s)[kTiles][4]) {
    float shrink[kTiles][2];
    bool grown = false;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = fmaxf(s[t][i], s[t][i + 2]);
#pragma unroll
        for (int h = 4; h < kWarp; h *= 2) {
          most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, h));
        }
        most = fmaxf(base[t][i], ceilf(most));
        const float used = most == -INFINITY ? 0.0f : most;
        shrink[t][i] = base_factor(base[t][i], used);
        grown |= most != base[t][i];
        base[t][i] = most;
        s[t][i] = exp2_fast(s[t][i] - used);
        s[t][i + 2] = exp2_fast(s[t][i + 2] - used);
        sum[t][i] = fmaf(sum[t][i], shrink[t][i], s[t][i] + s[t][i + 2]);
      }
    }
    if (!__any_sync(0xFFFFFFFFu, grown)) return;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[t][n][i] *= shrink[t][i % 2];
      }
    }
  }

  __device__ __forceinline__ void add_values(const float (&s)[kTiles][4], const __half* v) {
    const int lane = threadIdx.x % kWarp, row = lane / 16 * 8 + lane % 8;
    unsigned w[kTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      w[t][0] = transpose_8x8(pack_halves(s[t][0], s[t][1]));
      w[t][1] = transpose_8x8(pack_halves(s[t][2], s[t][3]));
    }
    // Unit v_unit(row, 2 n + lane / 8 % 2): the bits of n are apart from the others.
    const int own = row * D + (lane / 8 % 2 ^ lane % 8) * 8;
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      unsigned x[4];
      load_matrices_transposed(x, v + (own ^ n % 4 * 16) + n / 4 * 64);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) multiply_16x8x16(out[t][n], x, w[t][0], w[t][1]);
    }
  }

  // To shared memory: values [row][D + 4], base and sum [row] of the first `rows`.
  __device__ __forceinline__ void save(float* values, float2* bases, int rows) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = t * 8 + lane % 4 * 2 + i;
        float total = sum[t][i];
#pragma unroll
        for (int h = 4; h < kWarp; h *= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, h);
        if (row < rows) {
          if (lane < 4) bases[row] = make_float2(base[t][i], total);
          float* to = values + row * (D + 4) + lane / 4;
#pragma unroll
          for (int n = 0; n < D / 16; ++n) {
            to[n * 16] = out[t][n][i];
            to[n * 16 + 8] = out[t][n][i + 2];
          }
        }
      }
    }
  }
};

}  // namespace exl3::cuda
