// Who owns what in the trellis search: 512 threads, 128 states each, T tiles side by side.
//
// Nodes fall into groups: those with equal low bits (`q`) lead to the same 2^K nodes q*2^K + j. A
// thread owns the edges between the predecessors h and some successors j of its groups, the same
// ones at every step, so that its part of the table stays in registers and in its own column of
// shared memory. A node's costs of T tiles lie together and are read and written as one vector.
#pragma once
#include <cuda_runtime.h>

#include "exl3/codebook.h"
#include "exl3/encode.h"

namespace exl3::cuda {

constexpr int kSearchThreads = 512;
constexpr int kOwnStates = kStates / kSearchThreads;

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }
constexpr int at_least(int a, int b) { return a > b ? a : b; }

// Tiles side by side that fit the shared memory of compute capability 9.0.
constexpr int most_tiles(int bits) { return bits <= 2 ? 1 : bits == 3 ? 2 : 4; }

template <int T>
struct alignas(4 * T) Cost {
  int32_t of[T];
};

template <int K, int T>
struct Plan {
  static constexpr bool kTagged = K <= kEncodeTaggedBits;
  static constexpr bool kSplit = K == 8;  // two threads share the predecessors of a node
  static constexpr int kNodes = kStates >> K, kFan = 1 << K, kGroups = kNodes >> K;
  static constexpr int kPreds = kSplit ? kOwnStates : kFan;
  static constexpr int kSuccs = K <= 3 ? kFan : at_least(kOwnStates >> K, 1);
  static constexpr int kOwnGroups = kOwnStates / (kPreds * kSuccs);
  static constexpr int kMine = kOwnGroups * kSuccs;  // nodes of a thread
  // Where the states of a thread are kept; what is left lies in global memory.
  static constexpr int kInRegisters = K == 1 ? 32 : 64, kInShared = K == 1 ? 32 : 64;
  static constexpr int kInGlobal = kOwnStates - kInRegisters - kInShared;
  // A gap every 2^kGap nodes keeps the writes of a warp in different banks.
  static constexpr int kGap = at_least(K, log2_of(32 / T));
  static constexpr int kPlaces = kNodes + (kNodes >> kGap);
  static constexpr int kChoiceBits = K == 3 ? 4 : K;
  static constexpr int kPerWord = 32 / kChoiceBits;  // choices in a word
  static constexpr int kWords = kTagged ? (kMine + kPerWord - 1) / kPerWord : 0;
  // Bytes that a step leaves for the trace: choices, or costs.
  static constexpr int64_t kRowBytes =
      kTagged ? int64_t{kWords} * T * kSearchThreads * 4 : int64_t{kNodes} * T * 4;
  static constexpr int64_t kBlockBytes =
      kEncodeRing * kRowBytes + int64_t{kInGlobal} * kSearchThreads * 4;

  static __device__ constexpr int place(int node) { return node + (node >> kGap); }
  static __device__ int group(int tid, int g) {
    if constexpr (K <= 3) return g * kSearchThreads + tid;
    return tid & (kGroups - 1);
  }
  // Node m of a thread.
  static __device__ int node(int tid, int m) {
    if constexpr (K <= 3) return ((m / kSuccs) * kSearchThreads + tid) * kFan + m % kSuccs;
    if constexpr (kSplit) return tid & (kNodes - 1);
    return (tid & (kGroups - 1)) * kFan + tid / kGroups * kSuccs + m;
  }
  static __device__ int first_pred(int tid) { return kSplit ? tid / kNodes * kPreds : 0; }
  static __device__ int tag(int node) { return kTagged ? node >> (16 - 2 * K) : 0; }

  // Where the pair of a state is in the table (exl3/ops/encode.py).
  static __device__ int table_at(int h, int node) {
    constexpr int kPeriod = K < 4 ? 16 >> K : 1;
    const int in_row = node & 15;
    const int lane = K < 4 ? (in_row & (kFan - 1)) * kPeriod + (in_row >> K) : in_row;
    return ((node >> 4) * kFan + h) * 16 + lane;
  }
  static __device__ int table_at_own(int tid, int e) {
    const int m = e / (kPreds * kSuccs) * kSuccs + e % kSuccs;
    return table_at(first_pred(tid) + e / kSuccs % kPreds, node(tid, m));
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

template <int K, int T>
struct Shared {
  uint4 table[at_least(Plan<K, T>::kInShared / 4, 1)][kSearchThreads];
  Cost<T> cost[Plan<K, T>::kPlaces];
  Cost<T> half[Plan<K, T>::kSplit ? 256 : 1];
  Slot slot[T];
  int32_t low[2][T];  // least cost before and after the step, by the parity of the clock
  int best[T];
  int event;  // the clock at which a slot reaches its goal
};

}  // namespace exl3::cuda
