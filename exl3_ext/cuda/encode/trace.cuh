// Tracing a walk back and writing a closed lap: one warp a tile. Follows cpu/encode.cpp.
#pragma once
#include "cuda/encode/step.cuh"

namespace exl3::cuda {

constexpr int kRingMask = kEncodeRing - 1, kLapMask = kTileNumel - 1;
constexpr unsigned kAll = 0xFFFFFFFFu;

template <int K, int T>
struct Tracer {
  using P = Plan<K, T>;
  const EncodeParams& p;
  Slot& slot;
  const unsigned char* ring;
  int t, lane, step;  // which slot; lane of the warp; steps of the tile so far

  __device__ const unsigned char* row(int at) const {
    return ring + ((slot.begin + at) & kRingMask) * P::kRowBytes;
  }
  __device__ int oldest() const { return max(0, step - kRingMask); }
  static __device__ int before(int h, int node) { return h << (16 - 2 * K) | node >> K; }

  // The stored choice of a node at a step. Tagged rates.
  __device__ int choice(int at, int node) const {
    const int j = node & (P::kFan - 1), q = node >> K;
    int tid, m;
    if constexpr (K <= 3) {
      tid = q & (kSearchThreads - 1);
      m = q / kSearchThreads * P::kSuccs + j;
    } else {
      tid = q + j / P::kSuccs * P::kGroups;
      m = j % P::kSuccs;
    }
    const uint32_t* words = reinterpret_cast<const uint32_t*>(row(at));
    const uint32_t word = __ldcg(words + (m / P::kPerWord * T + t) * kSearchThreads + tid);
    return word >> m % P::kPerWord * P::kChoiceBits & (P::kFan - 1);
  }

  // The best predecessor of a node at a step, from the costs. Other rates.
  __device__ int search(int at, int node) const {
    const int32_t* costs = reinterpret_cast<const int32_t*>(row(at)) + t;
    const int y = slot.weight[(slot.origin + at) & kLapMask];
    constexpr int kTurns = at_least(P::kFan / 32, 1);
    int32_t cost[kTurns], least = INT32_MAX;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int h = i * 32 + lane;
      const int d = p.table[2 * P::table_at(h, node)] - y;
      cost[i] = __ldcg(costs + (h * P::kGroups + (node >> K)) * T) + d * d;
      least = min(least, cost[i]);
    }
    least = warp_min(least);
    int h = P::kFan;
#pragma unroll
    for (int i = kTurns - 1; i >= 0; --i) {
      const unsigned found = __ballot_sync(kAll, cost[i] == least);
      if (found) h = i * 32 + __ffs(found) - 1;
    }
    return h;
  }

  // Puts the node before step `at` on the path; false where it meets the path traced before.
  __device__ bool put(int at, int node) {
    uint16_t& entry = slot.path[at & kRingMask];
    const bool met = at < slot.traced && entry == node;
    __syncwarp();
    if (lane == 0) entry = static_cast<uint16_t>(node);
    return !met;
  }

  // At tagged rates the choices of all nodes that may come up in the next steps are read at once.
  __device__ void trace(int node) {
    constexpr int kDepth = P::kTagged ? 5 / K + 1 : 1;
    if (lane == 0) slot.path[step & kRingMask] = static_cast<uint16_t>(node);
    bool going = true;
    for (int at = step - 1; going && at >= oldest(); at -= kDepth) {
      int found[kDepth], guess = node;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if constexpr (P::kTagged)
          found[d] = at - d >= oldest() ? choice(at - d, guess) : 0;
        else
          found[d] = search(at, node);
        guess = before(lane >> d * K & (P::kFan - 1), guess);
      }
      int chosen = 0;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (!going || at - d < oldest()) break;
        const int h = __shfl_sync(kAll, found[d], chosen & 31);
        node = before(h, node);
        going = put(at - d, node);
        chosen |= h << d * K;
      }
    }
    __syncwarp();
    if (lane == 0) slot.traced = step;
    __syncwarp();
  }

  __device__ bool same(int at) const {
    return slot.path[at & kRingMask] == slot.path[(at + kTileNumel) & kRingMask];
  }

  // The step nearest to the middle with the same node a lap later, or -1.
  __device__ int closed_at() const {
    const int first = oldest(), last = step - kTileNumel, middle = (first + last) / 2;
    for (int base = 0; base <= last - middle; base += 32) {
      const int k = base + lane;
      int found = -1;
      if (k <= last - middle) {
        if (middle - k >= first && same(middle - k)) found = middle - k;
        if (same(middle + k)) found = middle + k;
      }
      const unsigned any = __ballot_sync(kAll, found >= 0);
      if (any) return __shfl_sync(kAll, found, __ffs(any) - 1);
    }
    return -1;
  }

  // Packs the lap that starts at step `at`.
  __device__ void write(int at) const {
    const auto bits_until = [&](int x, int count) {
      uint32_t stream = 0;
      for (int i = count - 1; i >= 0; --i) {
        const int ahead = (x - i - slot.origin - at) & kLapMask;
        stream = stream << K | (slot.path[(at + ahead + 1) & kRingMask] & (P::kFan - 1));
      }
      return stream;
    };
    for (int x = lane; x < kTileNumel; x += 32)
      p.values[slot.tile * kTileNumel + x] =
          p.codebook[bits_until(x, (15 + K) / K) & (kStates - 1)];
    for (int w = lane; w < 16 * K; w += 32) {
      const int x = (16 * w + 15) / K, spare = K * (x + 1) - 16 * (w + 1);
      p.trellis[slot.tile * 16 * K + stored_word(w)] =
          static_cast<uint16_t>(bits_until(x, 16 / K + 2) >> spare);
    }
  }

  // The slot has reached its goal. True when its tile is encoded.
  __device__ bool arrive(int best) {
    constexpr int kMore = kEncodePatience[K].more;
    trace(slot.forced >= 0 ? slot.forced : best);
    const int at = slot.forced >= 0 ? 0 : closed_at();
    if (at >= 0) {
      write(at);
      return true;
    }
    if (lane == 0) {
      if (step < kEncodeMaxSteps) {
        slot.goal += kMore;
      } else {
        const int from = step - 3 * kTileNumel / 4;
        slot.origin = (slot.origin + from) & kLapMask;
        slot.restart = slot.forced = slot.path[from & kRingMask];
      }
    }
    return false;
  }
};

}  // namespace exl3::cuda
