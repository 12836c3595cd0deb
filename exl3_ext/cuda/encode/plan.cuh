// Who owns what in the trellis search: 512 threads, 128 states each, T tiles side by side.
//
// Nodes fall into groups: those with equal low bits (`q`) lead to the same 2^K nodes q*2^K + j. A
// thread owns the edges between the predecessors h and some successors j of its groups, the same
// ones at every step, so that its part of the table stays where it is. It works through them in
// passes; a pass ends with the costs of its nodes, which go to the other of two buffers.
//
//            states of the table           node costs           T            a pass
//   K >= 4   one int16 each                T int32 together     1, 2, 4      up to 8 nodes of
//   a group; below: coarse_plan.cuh
//
// Registers and the thread's column of shared memory hold the table.
#pragma once
#include <cuda_runtime.h>

#include "exl3/codebook.h"
#include "exl3/encode.h"

namespace exl3::cuda {

constexpr int kSearchThreads = 512;
constexpr int kOwnStates = kStates / kSearchThreads;

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }
constexpr int at_least(int a, int b) { return a > b ? a : b; }

// Tiles side by side that fit the shared memory of compute capability 9.0, the largest.
constexpr int most_tiles(int bits) { return bits <= 2 ? bits : 4; }

template <int T>
struct alignas(4 * T) Cost {
  int32_t of[T];
};

template <int K, int T>
struct Plan {
  static constexpr bool kTagged = K == kEncodeTaggedBits, kCoarse = false;
  static constexpr bool kSplit = K == 8;  // two lanes share the predecessors of a node
  static constexpr int kNodes = kStates >> K, kFan = 1 << K, kGroups = kNodes >> K;
  static constexpr int kPreds = kSplit ? kOwnStates : kFan;
  static constexpr int kSuccs = at_least(kOwnStates >> K, 1);
  static constexpr int kPassNodes = K == 4 ? kSuccs / 2 : kSuccs;
  static constexpr int kPasses = kOwnStates / (kPreds * kPassNodes);
  static constexpr int kMine = kPasses * kPassNodes;  // nodes of a thread
  // The thread's part of the table in words, and where it is kept.
  static constexpr int kTable = kOwnStates / 2, kInRegisters = 48;
  static constexpr int kInShared = kTable - kInRegisters;
  // A gap every 2^kGap nodes keeps the writes of a warp in different banks.
  static constexpr int kGap = at_least(K, log2_of(32 / T));
  static constexpr int kPlaces = kNodes + (kNodes >> kGap);
  static constexpr int kPerWord = 32 / K;  // choices in a word
  static constexpr int kWords = kTagged ? (kMine + kPerWord - 1) / kPerWord : 0;
  // Bytes that a step leaves for the trace: choices, or the costs before it, tile by tile.
  static constexpr int64_t kRowBytes =
      kTagged ? int64_t{kWords} * T * kSearchThreads * 4 : int64_t{kNodes} * T * 4;
  static constexpr int64_t kBlockBytes = kEncodeRing * kRowBytes;

  static __device__ constexpr int place(int node) { return node + (node >> kGap); }
  static __device__ int group(int tid) { return tid & (kGroups - 1); }
  // The first node of a pass; the others follow it.
  static __device__ int node(int tid, int pass) {
    if constexpr (kSplit) return tid / 32 * 16 + tid % 16;
    return (tid & (kGroups - 1)) * kFan + tid / kGroups * kSuccs + pass * kPassNodes;
  }
  // The thread of a node, and which of its nodes it is.
  static __device__ int owner(int node, int& mine) {
    mine = node % kSuccs;
    return node / kFan + node % kFan / kSuccs * kGroups;
  }
  static __device__ int first_pred(int tid) { return kSplit ? (tid / 16 & 1) * kPreds : 0; }
  static __device__ int tag(int node) { return kTagged ? node >> (16 - 2 * K) : 0; }

  // Where the pair of a state is in the table (exl3/ops/encode.py).
  static __device__ int table_at(int h, int node) {
    return ((node >> 4) * kFan + h) * 16 + (node & 15);
  }
  // The thread's states in the order of use: pass, predecessor, node.
  static __device__ int table_at_own(int tid, int e) {
    const int pass = e / (kPreds * kPassNodes), h = e / kPassNodes % kPreds;
    return table_at(first_pred(tid) + h, node(tid, pass) + e % kPassNodes);
  }
};

// A tile on its way. `begin` is the clock at its step 0.
struct Slot {
  int64_t tile;  // -1: none
  int begin, origin, forced, goal, traced;
  int restart;  // node to start from, -1: anywhere, -2: no restart
  int16_t weight[kTileNumel];
  uint16_t path[kEncodeRing];
};

// What a block of T tiles knows beside their costs.
template <int T>
struct Arrivals {
  Slot slot[T];
  int best[T];           // node of the least cost
  int64_t following[T];  // the slot's next tile
  int closed[T];         // step at which the lap to write begins, or -1
  int event;             // the clock at which a slot reaches its goal
  int alone;             // the only slot that has a tile, or -1
};

// Word i of the thread's table, asked for in order.
template <int N, int M>
static __device__ __forceinline__ uint32_t table_word(const uint32_t (&mine)[N],
                                                      const uint4 (&rest)[M][kSearchThreads],
                                                      uint4& quad, int i) {
  if (i < N) return mine[i < N ? i : 0];
  if ((i - N) % 4 == 0) quad = rest[(i - N) / 4][threadIdx.x];
  const int part = (i - N) % 4;
  return part == 0 ? quad.x : part == 1 ? quad.y : part == 2 ? quad.z : quad.w;
}

template <int K, int T>
struct Shared : Arrivals<T> {
  using P = Plan<K, T>;
  alignas(16) Cost<T> cost[2][P::kPlaces];
  uint4 table[P::kInShared / 4][kSearchThreads];
  int32_t low[3][T];  // least cost before the step, after it, and the next one's
};

// Sets the costs of a walk that begins at the clock: in `start`, or anywhere if it is -1.
template <int K, int T>
static __device__ void start_costs(Shared<K, T>& s, unsigned char*, int clock, int t, int start) {
  using P = Plan<K, T>;
  for (int i = threadIdx.x; i < P::kNodes; i += kSearchThreads) {
    const int cost = start < 0 || i == start ? 0 : kEncodeCap & -256;
    s.cost[clock & 1][P::place(i)].of[t] = cost | P::tag(i);
  }
  if (threadIdx.x == 0) s.low[clock % 3][t] = 0;
}

// Lowers best to the first node of the least cost.
template <int K, int T>
static __device__ void find_best(Shared<K, T>& s, int clock, int t) {
  using P = Plan<K, T>;
  const int32_t low = s.low[clock % 3][t];
  for (int i = threadIdx.x; i < P::kNodes; i += kSearchThreads)
    if ((s.cost[clock & 1][P::place(i)].of[t] & encode_keep(K)) == low) atomicMin(&s.best[t], i);
}
template <int K, int T>
static __device__ int best_node(const Shared<K, T>& s, int t) {
  return s.best[t];
}

}  // namespace exl3::cuda
