// Tracing a walk back and writing a closed lap. Follows cpu/encode.cpp.
//
// A trace is a chain of dependent loads, by one warp a tile. The rows that it may need are sent for
// all at once, so that the loads find them in the second-level cache.
#pragma once
#include "cuda/common/reduce.cuh"
#include "cuda/encode/coarse_plan.cuh"

namespace exl3::cuda {

constexpr int kRingMask = kEncodeRing - 1, kLapMask = kTileNumel - 1;
constexpr unsigned kAll = 0xFFFFFFFFu;

template <int K, int T>
struct Tracer {
  using P = PlanOf<K, T>;
  const EncodeParams& p;
  Slot& slot;
  const unsigned char* ring;
  int t, lane, step;  // which slot; lane of the warp; steps of the tile so far

  __device__ int oldest() const { return max(0, step - encode_reach(K)); }
  static __device__ int before(int h, int node) { return h << (16 - 2 * K) | node >> K; }
  // Where a step's row is, from the clock of step 0.
  static __device__ uint32_t row(int begin, int at) {
    return static_cast<uint32_t>((begin + at) & kRingMask) * static_cast<uint32_t>(P::kRowBytes);
  }

  // The stored choice of a node at a step. Tagged rates.
  __device__ int choice(uint32_t row, int node) const {
    int mine;
    const int tid = P::owner(node, mine);
    const int word = (mine / P::kPerWord * T + t) * kSearchThreads + tid;
    const uint32_t held = __ldcg(reinterpret_cast<const uint32_t*>(ring + row) + word);
    return held >> mine % P::kPerWord * K & (P::kFan - 1);
  }

  // The best predecessor of a node at a step with weight y, from the costs. Other rates.
  __device__ int search(uint32_t row, int node, int y) const {
    const int32_t* costs =
        reinterpret_cast<const int32_t*>(ring + row) + t * P::kNodes + (node >> K);
    const int16_t* numbers = p.table + 2 * P::table_at(lane, node);
    constexpr int kTurns = at_least(P::kFan / 32, 1);
    constexpr int kStride = 2 * 32 * kEncodeLanes;  // of 32 predecessors in the table
    int32_t cost[kTurns], least = INT32_MAX;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int d = __ldg(numbers + i * kStride) - y;
      cost[i] = __ldcg(costs + (i * 32 + lane) * P::kGroups) + d * d;
      least = min(least, cost[i]);
    }
    least = warp_min(least);
    int h = 0;
#pragma unroll
    for (int i = kTurns - 1; i >= 0; --i) {
      const unsigned found = __ballot_sync(kAll, cost[i] == least);
      h = found ? i * 32 + __ffs(found) - 1 : h;
    }
    return h;
  }

  // Sends for what the next trace reads of rows `bottom` to `step`.
  __device__ void send_for(int begin, int bottom) const {
#if __CUDA_ARCH__ >= 900
    constexpr int kParts = P::kTagged ? P::kWords : 1;
    constexpr int kBytes = static_cast<int>(P::kRowBytes / T / kParts);
    for (int at = step - 1 - lane; at >= bottom; at -= 32)
      for (int part = 0; part < kParts; ++part)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                         __cvta_generic_to_global(ring + row(begin, at) + (part * T + t) * kBytes)),
                     "r"(kBytes)
                     : "memory");
#endif
  }

  // The choices of the kStride steps before step `at` on the best path to `node`, the last in the
  // low bits: all ways from the row of costs there. Coarse rates.
  __device__ int ways(int at, int node) const {
    constexpr int kSteps = P::kStride, kTurns = at_least((1 << K * kSteps) / 32, 1);
    constexpr int kWays = 1 << K * kSteps;
    const int from = at - kSteps;
    const auto* row = reinterpret_cast<const CoarseCost*>(
        ring + t * P::kTileBytes + (from / kSteps & (P::kRows - 1)) * P::kRowBytes);
    int y[kSteps], least = INT32_MAX;
    for (int d = 0; d < kSteps; ++d) y[d] = slot.weight[(slot.origin + at - 1 - d) & kLapMask];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int way = turn * 32 + lane;
      int reached = node, cost = 0, order = 0;
#pragma unroll
      for (int d = 0; d < kSteps; ++d) {
        const int h = way >> d * K & (P::kFan - 1);
        const int number = __ldg(p.table + encode_coarse_place(K, h, reached));
        cost += encode_coarse_edge(number, y[d], encode_wide(K, y[d]));
        reached = before(h, reached);
        order = order << K | h;  // of equal ways the one with the least h at the last step
      }
      cost += __ldcg(row + reached);
      if (way < kWays) least = min(least, (cost + 0x10000) * kWays + order);
    }
    const int order = warp_min(least) & (kWays - 1);
    int result = 0;
    for (int d = 0; d < kSteps; ++d)
      result |= (order >> (kSteps - 1 - d) * K & (P::kFan - 1)) << d * K;
    return result;
  }

  // Puts the best path to `node` on slot.path; stops where it meets the one traced before.
  __device__ void trace_coarse(int node) {
    const int bottom = oldest(), traced = slot.traced;
    if (lane == 0) slot.path[step & kRingMask] = static_cast<uint16_t>(node);
    bool met = false;
    for (int at = step; !met && at > bottom; at -= P::kStride) {
      const int chosen = ways(at, node);
#pragma unroll
      for (int d = 0; d < P::kStride; ++d) {
        node = before(chosen >> d * K & (P::kFan - 1), node);
        if (met) continue;
        uint16_t& entry = slot.path[(at - 1 - d) & kRingMask];
        if (at - 1 - d < traced) met = __shfl_sync(kAll, entry == node, 0);
        if (lane == 0) entry = static_cast<uint16_t>(node);
      }
    }
    __syncwarp();
  }

  // Puts the best path to `node` on slot.path; stops where it meets the one traced before. At
  // tagged rates the choices of all nodes that may come up in the next steps are read at once.
  __device__ void trace(int node) {
    constexpr int kDepth = P::kTagged ? 5 / K + 1 : 1;
    constexpr int kAhead = 64;  // steps below an earlier trace that may change, mostly
    const int bottom = oldest(), begin = slot.begin, origin = slot.origin, traced = slot.traced;
    send_for(begin, traced ? max(bottom, traced - kAhead) : bottom);
    if (lane == 0) slot.path[step & kRingMask] = static_cast<uint16_t>(node);
    bool met = false;
    for (int at = step - 1; !met && at >= bottom; at -= kDepth) {
      int found[kDepth], guess = node, chosen = 0;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const int there = max(at - d, bottom);
        if constexpr (P::kTagged)
          found[d] = choice(row(begin, there), guess);
        else
          found[d] = search(row(begin, there), node, slot.weight[(origin + there) & kLapMask]);
        guess = before(lane >> d * K & (P::kFan - 1), guess);
      }
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const int h = P::kTagged ? __shfl_sync(kAll, found[d], chosen & 31) : found[d];
        node = before(h, node);
        chosen |= h << d * K;
        if (met || at - d < bottom) continue;
        uint16_t& entry = slot.path[(at - d) & kRingMask];
        if (at - d < traced) met = __shfl_sync(kAll, entry == node, 0);
        if (lane == 0) entry = static_cast<uint16_t>(node);
      }
    }
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

  // Packs the lap that starts at step `at`. By all threads.
  __device__ void write(int at) const {
    const auto bits_until = [&](int x, int count) {
      uint32_t stream = 0;
      for (int i = count - 1; i >= 0; --i) {
        const int ahead = (x - i - slot.origin - at) & kLapMask;
        stream = stream << K | (slot.path[(at + ahead + 1) & kRingMask] & (P::kFan - 1));
      }
      return stream;
    };
    const int x = threadIdx.x, w = x - kTileNumel;
    if (x < kTileNumel)
      p.values[slot.tile * kTileNumel + x] =
          p.codebook[bits_until(x, (15 + K) / K) & (kStates - 1)];
    if (w >= 0 && w < 16 * K) {
      const int until = (16 * w + 15) / K, spare = K * (until + 1) - 16 * (w + 1);
      p.trellis[slot.tile * 16 * K + stored_word(w)] =
          static_cast<uint16_t>(bits_until(until, 16 / K + 2) >> spare);
    }
  }

  // The path does not close. By one thread.
  __device__ void go_on() {
    constexpr EncodePatience kPatience = kEncodePatience[K];
    slot.traced = step;
    if (step < kPatience.most) {
      slot.goal += kPatience.more;
    } else {
      const int from = step - 3 * kTileNumel / 4;
      slot.origin = (slot.origin + from) & kLapMask;
      slot.restart = slot.forced = slot.path[from & kRingMask];
    }
  }
};

}  // namespace exl3::cuda
