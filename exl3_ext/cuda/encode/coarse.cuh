// One step of the trellis search at 1 and 2 bits, where nodes are many and edges a node few.
//
// An edge is one dot product of the state's two int16 with two bytes, which adds the old cost, and
// half a minimum of three. Costs are kept in 16 bits: half the traffic, and room for two buffers.
#pragma once
#include "cuda/encode/plan.cuh"

namespace exl3::cuda {

// What the weight of a step does to the edges.
struct CoarsePull {
  int32_t bytes;        // gain and weight
  int32_t first, last;  // a cost starts from the first and is lowered by the last
};

template <int K>
static __device__ __forceinline__ CoarsePull coarse_pull(const EncodeParams& p, const Slot& slot,
                                                         int clock, int32_t low) {
  const int y = slot.weight[(slot.origin + clock - slot.begin) & (kTileNumel - 1)];
  const int32_t shift = encode_shift(K, low);
  return {(p.gain & 255) | (y & 255) << 8, encode_cap(K) + shift, shift};
}

// Bytes of both; 8 more in a digit of the pattern takes the sign of the byte.
template <int kPattern>
static __device__ __forceinline__ int32_t permute_signed(uint32_t low, uint32_t high) {
  int32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "n"(kPattern));
  return result;
}

// A step of all nodes of the thread; returns the least new cost of the thread.
template <int K>
static __device__ __forceinline__ int32_t
coarse_step(const uint32_t (&mine)[Plan<K, 1>::kInRegisters], Shared<K, 1>& s,
            const CoarsePull& pull, int buffer, uint32_t* row) {
  using P = Plan<K, 1>;
  constexpr uint32_t kMost = 0x7FFF7FFFu;
  const int tid = threadIdx.x;
  const uint32_t* before = reinterpret_cast<const uint32_t*>(s.cost.at[buffer]) + tid;
  uint32_t* after = reinterpret_cast<uint32_t*>(s.cost.at[buffer ^ 1]);
  const uint32_t lower = __byte_perm(-pull.last, 0, 0x2121);
  uint32_t least = kMost, choices = 0;
  uint4 quad{};
#pragma unroll
  for (int pass = 0; pass < P::kPasses; ++pass) {
    int32_t best[P::kPassNodes];
#pragma unroll
    for (int m = 0; m < P::kPassNodes; ++m) best[m] = pull.first;
#pragma unroll
    for (int h = 0; h < P::kPreds; ++h) {
      const uint32_t two = before[pass * kSearchThreads + h * (P::kGroups / 2)];
      // 256 times the cost and the tag
      const int32_t old[2] = {permute_signed<0x9104>(two, h), permute_signed<0xB324>(two, h)};
#pragma unroll
      for (int m = 0; m < P::kPassNodes; ++m) {
        const int e = (pass * P::kPreds + h) * P::kPassNodes + m;
        const uint32_t pair = table_word(mine, s.table, quad, e);
        best[m] = min(best[m], __dp2a_lo(static_cast<int>(pair), pull.bytes, old[m / P::kSuccs]));
      }
    }
    uint32_t cost[P::kPassNodes / 2];
#pragma unroll
    for (int m = 0; m < P::kPassNodes; ++m) {
      choices = __funnelshift_r(choices, best[m], K);
      if (m % 2 == 0) continue;
      cost[m / 2] = __vadd2(__byte_perm(best[m - 1], best[m], 0x6521), lower);
      least = __vmins2(least, cost[m / 2]);
    }
    const int at = pass * kSearchThreads + tid;
    if constexpr (K == 1)
      reinterpret_cast<uint2*>(after)[at] = {cost[0], cost[1]};
    else
      reinterpret_cast<uint4*>(after)[at] = {cost[0], cost[1], cost[2], cost[3]};
    constexpr int kFull = P::kPerWord / P::kPassNodes;  // passes that fill a word
    if (pass % kFull == kFull - 1) row[pass / kFull * kSearchThreads + tid] = choices;
  }
  return min(static_cast<int16_t>(least), static_cast<int32_t>(least) >> 16) * 256;
}

}  // namespace exl3::cuda
