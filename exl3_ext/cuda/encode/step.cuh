// One step of the trellis search for T tiles from 4 bits on: after[next] = min over h of before +
// edge.
//
// Two instructions an edge, a multiply-add and an add-minimum. To that come two or three a state
// that T tiles share: unpacking it, its square, and at 4 bits the rounding of the square.
#pragma once
#include "cuda/encode/plan.cuh"

namespace exl3::cuda {

// What the weight of a step does to the edges of a tile.
struct Pull {
  int32_t scale;  // of the table's number
  int32_t last;   // a cost starts from the cap plus this and is lowered by it
};

template <int K>
static __device__ __forceinline__ Pull pull(const Slot& slot, int clock, int32_t low) {
  constexpr bool kTagged = K == kEncodeTaggedBits;
  const int y = slot.weight[(slot.origin + clock - slot.begin) & (kTileNumel - 1)];
  const int lack = kTagged ? -32768 * kEncodeSquare : y * y;  // of an edge as it is taken here
  return {kTagged ? y * kEncodeUnit : -2 * y, encode_shift(K, low) - lack};
}

// The number of state e of the thread, two in a word. A dot product at 4 bits for most, because
// there the other instructions keep the pipe of the rest busier.
template <int K>
static __device__ __forceinline__ int unpack(uint32_t two, int e) {
  if (K == kEncodeTaggedBits && e / 2 % 4)
    return __dp2a_lo(static_cast<int>(two), e % 2 ? 0x0100 : 1, 0);
  return e % 2 ? static_cast<int>(two) >> 16 : static_cast<int16_t>(two);
}

// The part of a state's edges that no weight changes.
template <int K>
static __device__ __forceinline__ int square(int c) {
  int result = c * c;
  if (K == kEncodeTaggedBits) return (result + kEncodeSquare / 2) & -kEncodeSquare;
  asm("" : "+r"(result));  // or c * scale + c * c becomes c * (scale + c), a sum more an edge
  return result;
}

// The costs of N of T tiles, from the first on: all, or one.
template <int N, int T>
static __device__ __forceinline__ Cost<N> costs_of(const Cost<T>& all, int first) {
  if constexpr (N == T)
    return all;
  else
    return {all.of[first]};
}
template <int N, int T>
static __device__ __forceinline__ void put_costs(Cost<T>& all, int first, const Cost<N>& cost) {
  if constexpr (N == T)
    all = cost;
  else
    all.of[first] = cost.of[0];
}

template <int K, int T, int N>
static __device__ __forceinline__ void relax_pass(int32_t (&best)[Plan<K, T>::kPassNodes][N],
                                                  const uint32_t (&mine)[Plan<K, T>::kInRegisters],
                                                  const Shared<K, T>& s, const Cost<T>* before,
                                                  const Pull (&pulls)[N], int first, int pass) {
  using P = Plan<K, T>;
  uint4 quad{};
  uint32_t two = 0;
#pragma unroll
  for (int h = 0; h < P::kPreds; ++h) {
    const Cost<N> old = costs_of<N>(before[P::place(h * P::kGroups)], first);
#pragma unroll
    for (int m = 0; m < P::kPassNodes; ++m) {
      const int e = (pass * P::kPreds + h) * P::kPassNodes + m;
      if (e % 2 == 0) two = table_word(mine, s.table, quad, e / 2);
      const int c = unpack<K>(two, e), base = square<K>(c);
#pragma unroll
      for (int t = 0; t < N; ++t)
        best[m][t] = __viaddmin_s32(old.of[t], c * pulls[t].scale + base, best[m][t]);
    }
  }
}

// Writes the costs and choices of a pass and takes the least.
template <int K, int T, int N>
static __device__ __forceinline__ void settle_pass(int32_t (&best)[Plan<K, T>::kPassNodes][N],
                                                   Cost<T>* after, const Pull (&pulls)[N],
                                                   int first, int tag, uint32_t (&choices)[N],
                                                   int32_t (&least)[N]) {
  using P = Plan<K, T>;
#pragma unroll
  for (int m = 0; m < P::kPassNodes; ++m) {
    Cost<N> cost;
#pragma unroll
    for (int t = 0; t < N; ++t) {
      if (P::kSplit) best[m][t] = min(best[m][t], __shfl_xor_sync(~0u, best[m][t], 16));
      least[t] = min(least[t], best[m][t]);
      cost.of[t] = best[m][t];
      if constexpr (P::kTagged) {
        cost.of[t] = (best[m][t] & encode_keep(K)) | tag;
        choices[t] = __funnelshift_r(choices[t], best[m][t], K);
      }
      // A product, and not a difference, for the sake of the pipe; blockDim.y is 1.
      cost.of[t] = cost.of[t] * static_cast<int>(blockDim.y) - pulls[t].last;
    }
    if (P::kSplit && threadIdx.x / 16 % 2) continue;
    put_costs(after[m], first, cost);
  }
}

// Copies the costs before the step to its row of the ring, for the trace.
template <int K, int T, int N>
static __device__ __forceinline__ void keep_costs(const Cost<T>* before, int first,
                                                  unsigned char* row) {
  using P = Plan<K, T>;
#pragma unroll
  for (int from = 0; from < P::kNodes; from += kSearchThreads) {
    const int node = from + threadIdx.x;
    if (node >= P::kNodes) break;
    const Cost<N> cost = costs_of<N>(before[P::place(node)], first);
#pragma unroll
    for (int t = 0; t < N; ++t)
      reinterpret_cast<int32_t*>(row)[(first + t) * P::kNodes + node] = cost.of[t];
  }
}

// A step of all nodes of the thread, for N tiles from the first on; `least` receives the least cost
// of each. `row` is the clock's row of the ring.
template <int K, int T, int N>
static __device__ __forceinline__ void step(const uint32_t (&mine)[Plan<K, T>::kInRegisters],
                                            Shared<K, T>& s, const Pull (&pulls)[N],
                                            int32_t (&least)[N], int first, int buffer,
                                            unsigned char* row) {
  using P = Plan<K, T>;
  const int tid = threadIdx.x;
  uint32_t choices[N] = {};
  if constexpr (!P::kTagged) keep_costs<K, T, N>(s.cost[buffer], first, row);
#pragma unroll
  for (int t = 0; t < N; ++t) least[t] = kEncodeCap + pulls[t].last;
#pragma unroll
  for (int pass = 0; pass < P::kPasses; ++pass) {
    int32_t best[P::kPassNodes][N];
#pragma unroll
    for (int m = 0; m < P::kPassNodes; ++m)
#pragma unroll
      for (int t = 0; t < N; ++t) best[m][t] = kEncodeCap + pulls[t].last;
    const int from = P::first_pred(tid) * P::kGroups + P::group(tid);
    relax_pass<K, T, N>(best, mine, s, s.cost[buffer] + P::place(from), pulls, first, pass);
    const int node = P::node(tid, pass);
    settle_pass<K, T, N>(best, s.cost[buffer ^ 1] + P::place(node), pulls, first, P::tag(node),
                         choices, least);
    if (P::kTagged && (pass + 1) * P::kPassNodes % P::kPerWord == 0) {
      uint32_t* words = reinterpret_cast<uint32_t*>(row) +
                        (pass * P::kPassNodes / P::kPerWord * T + first) * kSearchThreads;
#pragma unroll
      for (int t = 0; t < N; ++t) words[t * kSearchThreads + tid] = choices[t];
    }
  }
#pragma unroll
  for (int t = 0; t < N; ++t) least[t] = (least[t] & encode_keep(K)) - pulls[t].last;
}

}  // namespace exl3::cuda
