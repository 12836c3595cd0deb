// Who owns what in the trellis search at 1 to 3 bits: 512 threads, 128 states each, one tile at a
// time.
//
// A node cost is 16 bits; two of neighbouring groups, q and q + 1 with q even, are a word, and so
// are the two states h, q*2^K + j and h, (q + 1)*2^K + j. A thread owns two groups a pass, all
// their predecessors and successors: 2^K times 2^K words, the same ones at every step. So 64
// registers hold its part of the table. With the costs of its 2^(K + 1) nodes it ends a pass.
#pragma once
#include <type_traits>

#include "cuda/common/reduce.cuh"
#include "cuda/encode/plan.cuh"

namespace exl3::cuda {

template <int K, int T>
struct CoarsePlan {
  static constexpr bool kTagged = false, kCoarse = true;
  static constexpr int kNodes = kStates >> K, kFan = 1 << K, kGroups = kNodes >> K;
  static constexpr int kTable = kOwnStates / 2, kPasses = kTable / (kFan * kFan);
  // Steps from one kept row of costs to the next, and kept rows.
  static constexpr int kStride = K == 3 ? 2 : 4, kRows = kEncodeRing / kStride;
  // Bytes of a row of costs in the ring, of a tile's ring, and of a block's.
  static constexpr int64_t kRowBytes = 2 * kNodes, kTileBytes = kRows * kRowBytes;
  static constexpr int64_t kBlockBytes = T * kTileBytes;
  // Where a word of costs is: at 3 bits gaps keep the writes of a warp in different banks.
  static __device__ constexpr int place(int word) { return K == 3 ? word + word / 32 * 4 : word; }
  static constexpr int kPlaces = kNodes / 2 + (K == 3 ? kNodes / 16 : 0);
  // The first node of a pass; the second group's come after its 2^K.
  static __device__ int node(int tid, int pass) { return (pass * kSearchThreads + tid) * 2 * kFan; }
};

constexpr int kHalfBits = 0x3800;  // a float16 of 0.5, what an edge of 0 is

// A cost is kept less a base, in 16 bits, so that costs may be as far below 0 as above: signed
// where there are instructions for halves of words, else never negative.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
using CoarseCost = uint16_t;
constexpr int kCoarseBase = -0x5C00, kCoarseLeast = 0;
#else
using CoarseCost = int16_t;
constexpr int kCoarseBase = kHalfBits - 0x1400, kCoarseLeast = -0x8000;
#endif
static __device__ __forceinline__ int first_cost(uint32_t two) {
  return static_cast<CoarseCost>(two);
}
static __device__ __forceinline__ int second_cost(uint32_t two) {
  return static_cast<CoarseCost>(two >> 16);
}

template <int K, int T>
struct CoarseShared : Arrivals<T> {
  using P = CoarsePlan<K, T>;
  alignas(16) uint32_t cost[2][T][P::kPlaces];
  int reference[2][T];  // kept cost
};

template <int K, int T>
static __device__ unsigned char* ring_row(unsigned char* ring, int t, int step) {
  using P = CoarsePlan<K, T>;
  return ring + t * P::kTileBytes + (step / P::kStride & (P::kRows - 1)) * P::kRowBytes;
}

template <int K, int T>
static __device__ void start_costs(CoarseShared<K, T>& s, unsigned char* ring, int clock, int t,
                                   int start) {
  using P = CoarsePlan<K, T>;
  uint32_t* row = reinterpret_cast<uint32_t*>(ring_row<K, T>(ring, t, 0));
  for (int i = threadIdx.x; i < P::kNodes / 2; i += kSearchThreads) {
    const auto kept = [&](int node) {
      const int cost = start < 0 || node == start ? 0 : kEncodeCoarseFar;
      return static_cast<uint32_t>(cost - kCoarseBase) & 0xFFFF;
    };
    const uint32_t two = kept(2 * i) | kept(2 * i + 1) << 16;
    s.cost[clock & 1][t][P::place(i)] = two;
    row[i] = two;
  }
  if (threadIdx.x == 0) s.reference[clock & 1][t] = -kCoarseBase;
}

// Lowers best to the least cost and below it the first node of that.
template <int K, int T>
static __device__ void find_best(CoarseShared<K, T>& s, int clock, int t) {
  using P = CoarsePlan<K, T>;
  int least = INT32_MAX;
  for (int i = threadIdx.x; i < P::kNodes / 2; i += kSearchThreads) {
    const uint32_t two = s.cost[clock & 1][t][P::place(i)];
    least = min(least, ((first_cost(two) - kCoarseLeast) << 15) + 2 * i);
    least = min(least, ((second_cost(two) - kCoarseLeast) << 15) + 2 * i + 1);
  }
  least = warp_min(least);
  if (threadIdx.x % 32 == 0) atomicMin(&s.best[t], least);
}
template <int K, int T>
static __device__ int best_node(const CoarseShared<K, T>& s, int t) {
  return s.best[t] & 0x7FFF;
}

template <int K, int T>
using PlanOf = std::conditional_t<K <= kEncodeCoarseBits, CoarsePlan<K, T>, Plan<K, T>>;
template <int K, int T>
using SharedOf = std::conditional_t<K <= kEncodeCoarseBits, CoarseShared<K, T>, Shared<K, T>>;

}  // namespace exl3::cuda
