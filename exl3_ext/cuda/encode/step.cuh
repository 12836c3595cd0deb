// One step of the trellis search for T tiles: after[next] = min over h of before + edge.
//
// Two instructions an edge, a multiply-add and an add-minimum, plus the unpacking of the state's
// pair, which T tiles share.
#pragma once
#include "cuda/encode/plan.cuh"

namespace exl3::cuda {

static __device__ __forceinline__ int warp_min(int v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(0xFFFFFFFFu, v);
#else
  for (int d = 16; d; d /= 2) v = min(v, __shfl_xor_sync(0xFFFFFFFFu, v, d));
  return v;
#endif
}

// What the weight of a step does to the edges of a tile.
struct Pull {
  int32_t low, high;    // of the dot products, T = 1
  int32_t scale;        // of the table's second number, or -2y
  int32_t first, last;  // a cost starts from the first and is lowered by the last
};

template <int K, int T>
static __device__ __forceinline__ Pull pull(const EncodeParams& p, const Slot& slot, int clock,
                                            int32_t low) {
  const int y = slot.weight[(slot.origin + clock - slot.begin) & (kTileNumel - 1)];
  const int shift = min(low, kEncodeShift);
  if constexpr (!Plan<K, T>::kTagged)
    return {0, 0, -2 * y, kEncodeCap + shift - y * y, shift - y * y};
  const int scale = y * (1 << K), gain = p.gain << K;
  const int y0 = static_cast<int8_t>(scale), g0 = static_cast<int8_t>(gain);
  const int y1 = (scale - y0) >> 8, g1 = (gain - g0) >> 8;
  return {(g0 & 255) | (y0 & 255) << 8, (g1 & 255) | (y1 & 255) << 8, scale, kEncodeCap + shift,
          shift};
}

// best = min(best, old + edge) for one state and all tiles.
template <int K, int T>
static __device__ __forceinline__ void relax(int32_t (&best)[T], const Cost<T>& old, uint32_t pair,
                                             const Pull (&pulls)[T], int gain, int e) {
  if constexpr (!Plan<K, T>::kTagged) {
    const int c = static_cast<int>(pair), square = c * c;
#pragma unroll
    for (int t = 0; t < T; ++t)
      best[t] = __viaddmin_s32(old.of[t], c * pulls[t].scale + square, best[t]);
  } else if constexpr (T == 1) {
    const int a = __dp2a_lo(static_cast<int>(pair), pulls[0].low, old.of[0]);
    const int b = __dp2a_lo(static_cast<int>(pair), pulls[0].high, 0);
    best[0] = min(best[0], a + (b << 8));
  } else {
    // The two halves of the machine that can unpack take turns.
    const int second =
        e & 1 ? __dp2a_lo(static_cast<int>(pair), 0x0100, 0) : static_cast<int>(pair) >> 16;
    const int base = static_cast<int16_t>(pair) * gain;
#pragma unroll
    for (int t = 0; t < T; ++t)
      best[t] = __viaddmin_s32(old.of[t], second * pulls[t].scale + base, best[t]);
  }
}

template <int K, int T>
static __device__ __forceinline__ void relax_all(int32_t (&best)[Plan<K, T>::kMine][T],
                                                 const uint32_t (&mine)[Plan<K, T>::kInRegisters],
                                                 const Shared<K, T>& s, const uint4* rest,
                                                 const Pull (&pulls)[T], int gain) {
  using P = Plan<K, T>;
  const int tid = threadIdx.x;
  const Cost<T>* before = s.cost + P::place(P::first_pred(tid) * P::kGroups + P::group(tid, 0));
  uint4 quad{};
#pragma unroll
  for (int g = 0; g < P::kOwnGroups; ++g) {
#pragma unroll
    for (int h = 0; h < P::kPreds; ++h) {
      const Cost<T> old = before[P::place(g * kSearchThreads) + P::place(h * P::kGroups)];
#pragma unroll
      for (int j = 0; j < P::kSuccs; ++j) {
        const int e = (g * P::kPreds + h) * P::kSuccs + j, out = e - P::kInRegisters;
        if (out >= 0 && out % 4 == 0)
          quad = out < P::kInShared
                     ? s.table[out / 4][tid]
                     : __ldcg(rest + (out - P::kInShared) / 4 * kSearchThreads + tid);
        const uint32_t pair = out < 0        ? mine[out < 0 ? e : 0]
                              : out % 4 == 0 ? quad.x
                              : out % 4 == 1 ? quad.y
                              : out % 4 == 2 ? quad.z
                                             : quad.w;
        relax<K, T>(best[g * P::kSuccs + j], old, pair, pulls, gain, e);
      }
    }
  }
}

// Writes the new costs and what the trace needs; `row` is the clock's row of the ring and `next`
// the one after it.
template <int K, int T>
static __device__ __forceinline__ void settle(int32_t (&best)[Plan<K, T>::kMine][T],
                                              Shared<K, T>& s, const Pull (&pulls)[T],
                                              unsigned char* row, unsigned char* next,
                                              int32_t* low) {
  using P = Plan<K, T>;
  const int tid = threadIdx.x;
  uint32_t choices[T] = {};
  int32_t least[T];
#pragma unroll
  for (int t = 0; t < T; ++t) least[t] = kEncodeCap;
  const int place = P::place(P::node(tid, 0));
#pragma unroll
  for (int m = 0; m < P::kMine; ++m) {
    const int node = P::node(tid, m);
    Cost<T> cost;
#pragma unroll
    for (int t = 0; t < T; ++t) {
      cost.of[t] = best[m][t] - pulls[t].last;
      if constexpr (P::kTagged) {
        cost.of[t] = (cost.of[t] & -P::kFan) | P::tag(node);
        choices[t] |= (best[m][t] & (P::kFan - 1)) << m % P::kPerWord * P::kChoiceBits;
      }
      least[t] = min(least[t], cost.of[t]);
    }
    s.cost[place + P::place(m / P::kSuccs * kSearchThreads * P::kFan) + m % P::kSuccs] = cost;
    if constexpr (!P::kTagged) reinterpret_cast<Cost<T>*>(next)[node] = cost;
    if (P::kTagged && (m % P::kPerWord == P::kPerWord - 1 || m == P::kMine - 1)) {
      uint32_t* words = reinterpret_cast<uint32_t*>(row) + m / P::kPerWord * T * kSearchThreads;
#pragma unroll
      for (int t = 0; t < T; ++t) {
        words[t * kSearchThreads + tid] = choices[t];
        choices[t] = 0;
      }
    }
  }
#pragma unroll
  for (int t = 0; t < T; ++t) {
    least[t] = warp_min(least[t]);
    if (tid % 32 == 0) atomicMin(&low[t], least[t]);
  }
}

}  // namespace exl3::cuda
