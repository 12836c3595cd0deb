// One step of the trellis search at 1 to 3 bits: after[next] = min over h of before + edge.
//
// Three instructions for two edges: the difference, its square as a number of steps, and an
// add-minimum of 16 bits. A float16 between 0.5 and 1 is a multiple of 2^-11, so the bits of
// 0.5 + d * d, bounded by 1, are those of 0.5 and the square in steps, rounded to even, which for
// the square of an integer is down where it is a tie (wide edges only).
#pragma once
#include <cuda_fp16.h>

#include "cuda/common/halves.cuh"
#include "cuda/encode/coarse_plan.cuh"

namespace exl3::cuda {

// What the weight of a step does to the edges.
struct CoarsePull {
  uint32_t y;      // twice, negative, as table words
  uint32_t lower;  // twice: taken off a sum
  bool wide;
};

// A number of the table or a weight as a float16 whose square counts in steps; 11 bits each.
static __device__ __forceinline__ uint32_t coarse_half(int number) {
  return __half_as_ushort(__float2half_rn(number * (1.0f / (1 << 13))));
}

constexpr uint32_t kHalves = kHalfBits * 0x10001u, kOnes = 0x3C003C00u;

template <bool kWide>
static __device__ __forceinline__ uint32_t coarse_edge(uint32_t two, uint32_t y) {
  const uint32_t d = halves_fma(two, kWide ? kHalves : kOnes, y);
  const uint32_t steps = halves_fma_sat(d, d, kHalves);
  return kWide ? steps * 4 - 3 * kHalves : steps;
}

// Sums of kept costs and edges, their least, and what is kept of that: by halves where there are
// instructions for that, else of whole words, as no half is negative or carries.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kSumBase = kCoarseBase;
static __device__ __forceinline__ uint32_t coarse_sum(uint32_t old, uint32_t edge) {
  return old + edge - kHalves;
}
static __device__ __forceinline__ uint32_t coarse_least(uint32_t old, uint32_t edge,
                                                        uint32_t best) {
  return __vminu2(coarse_sum(old, edge), best);
}
static __device__ __forceinline__ uint32_t coarse_keep(uint32_t best, uint32_t lower) {
  return best - lower;
}
static __device__ __forceinline__ uint32_t coarse_pair(int number) {
  return static_cast<uint32_t>(number * 0x10001);
}
#else
constexpr int kSumBase = kCoarseBase - kHalfBits;
static __device__ __forceinline__ uint32_t coarse_sum(uint32_t old, uint32_t edge) {
  return __vadd2(old, edge);
}
static __device__ __forceinline__ uint32_t coarse_least(uint32_t old, uint32_t edge,
                                                        uint32_t best) {
  return __viaddmin_s16x2(old, edge, best);
}
static __device__ __forceinline__ uint32_t coarse_keep(uint32_t best, uint32_t lower) {
  return __vsub2(best, lower);
}
static __device__ __forceinline__ uint32_t coarse_pair(int number) {
  return (number & 0xFFFF) * 0x10001u;
}
#endif

template <int K, int T>
static __device__ __forceinline__ CoarsePull coarse_pull(const CoarseShared<K, T>& s, int t,
                                                         int clock) {
  const Slot& slot = s.slot[t];
  const int y = slot.weight[(slot.origin + clock - slot.begin) & (kTileNumel - 1)];
  const bool wide = encode_wide(K, y);
  const uint32_t two = coarse_half(-y) * 0x10001u;
  // From a sum's base to that of a kept cost, and the reference.
  const uint32_t lower = coarse_pair(s.reference[clock & 1][t] + 2 * kCoarseBase - kSumBase);
  return {wide ? halves_fma(two, kHalves, 0) : two, lower, wide};
}

// Stores the words of a pass in node order.
template <int K>
static __device__ __forceinline__ void put_words(uint32_t* to, const uint32_t (&words)[1 << K]) {
  if constexpr (K == 1) {
    *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
  } else {
#pragma unroll
    for (int i = 0; i < 1 << K; i += 4)
      *reinterpret_cast<uint4*>(to + i) = {words[i], words[i + 1], words[i + 2], words[i + 3]};
  }
}

// A step of all nodes of the thread. `row`: where the new costs are kept, or null.
template <int K, int T, bool kWide>
static __device__ __forceinline__ void coarse_step(const uint32_t (&mine)[CoarsePlan<K, T>::kTable],
                                                   const uint32_t* before, uint32_t* after,
                                                   const CoarsePull& pull, uint32_t* row,
                                                   int* reference) {
  using P = CoarsePlan<K, T>;
  const int tid = threadIdx.x;
#pragma unroll
  for (int pass = 0; pass < P::kPasses; ++pass) {
    uint32_t best[P::kFan], words[P::kFan];
#pragma unroll
    for (int h = 0; h < P::kFan; ++h) {
      const uint32_t old = before[P::place(h * (P::kGroups / 2) + pass * kSearchThreads + tid)];
#pragma unroll
      for (int m = 0; m < P::kFan; ++m) {
        const uint32_t edge = coarse_edge<kWide>(mine[(pass * P::kFan + h) * P::kFan + m], pull.y);
        best[m] = h ? coarse_least(old, edge, best[m]) : coarse_sum(old, edge);
      }
    }
#pragma unroll
    for (int m = 0; m < P::kFan; ++m) best[m] = coarse_keep(best[m], pull.lower);
    if (pass == 0 && tid < 32) {  // the first 64 multiples of 2^K
      const int least = warp_min(min(first_cost(best[0]), second_cost(best[0])));
      if (tid == 0) *reference = least;
    }
#pragma unroll
    for (int m = 0; m < P::kFan; m += 2) {
      words[m / 2] = __byte_perm(best[m], best[m + 1], 0x5410);
      words[(m + P::kFan) / 2] = __byte_perm(best[m], best[m + 1], 0x7632);
    }
    const int word = P::node(tid, pass) / 2;
    put_words<K>(after + P::place(word), words);
    if (row) put_words<K>(row + word, words);
  }
}

}  // namespace exl3::cuda
