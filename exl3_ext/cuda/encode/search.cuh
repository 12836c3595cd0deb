// The trellis search of one bit rate: a thread block takes T tiles round their circles together.
//
// Work split: plan.cuh, coarse_plan.cuh. Memory: a quarter of the register file (half of it up to 3
// bits) holds the table, shared memory two buffers of node costs; choices (costs at other rates
// than 4 bits) of the last 512 steps go to global memory. On a device without that much shared
// memory, what belongs there is in the workspace: some times slower. One barrier a step. Bound by
// the arithmetic pipes. A tile that closes is replaced by the next one, so results do not depend on
// which tiles share a block.
#pragma once
#include "cuda/encode/coarse_step.cuh"
#include "cuda/encode/launch.h"
#include "cuda/encode/step.cuh"
#include "cuda/encode/trace.cuh"

namespace exl3::cuda {

// Makes a tile the slot's next one. By kTileNumel threads or more, before a barrier.
template <int K>
static __device__ void load_tile(const EncodeParams& p, Slot& slot, int64_t tile, bool first) {
  const bool there = tile < p.n_tiles;
  const int i = threadIdx.x;
  if (i < kTileNumel && (there || first)) {
    const float w = there ? p.tiles[tile * kTileNumel + i] : 0.0f;
    const float inside = fminf(fmaxf(w, -p.weight_limit), p.weight_limit);
    const float scaled = inside * p.weight_scale;
    const int y = __float2int_rn(scaled);
    slot.weight[i] = static_cast<int16_t>(
        K <= kEncodeCoarseBits ? encode_coarse_weight(K, __float2int_rd(scaled), y) : y);
  }
  if (i == 0) {
    slot.tile = there ? tile : -1;
    slot.origin = 0;
    slot.forced = -1;
    slot.restart = there || first ? -1 : -2;
    slot.goal = kTileNumel + kEncodePatience[K].first;
  }
}

static __device__ bool arrives(const Slot& slot, int clock) {
  return slot.tile >= 0 && slot.begin + slot.goal == clock;
}

// Sets the costs of slots that start anew and finds the next event. By all threads.
template <int K, int T>
static __device__ void begin_walks(SharedOf<K, T>& s, unsigned char* ring, int clock) {
  for (int t = 0; t < T; ++t)
    if (s.slot[t].restart != -2) start_costs(s, ring, clock, t, s.slot[t].restart);
  __syncthreads();
  if (threadIdx.x == 0) {
    s.event = INT32_MAX;
    int live = 0;
    for (int t = 0; t < T; ++t) {
      Slot& slot = s.slot[t];
      if (slot.restart != -2) {
        slot.begin = clock;
        slot.traced = 0;
        if (slot.restart >= 0) slot.goal = kTileNumel;
        slot.restart = -2;
      }
      s.best[t] = INT32_MAX;
      if (slot.tile < 0) continue;
      s.event = min(s.event, slot.begin + slot.goal);
      s.alone = live++ ? -1 : t;
    }
  }
  __syncthreads();
}

// Traces a slot that has reached its goal. By one warp.
template <int K, int T>
static __device__ void trace_slot(SharedOf<K, T>& s, Tracer<K, T>& tracer, int t,
                                  unsigned long long* next) {
  const Slot& slot = s.slot[t];
  const int node = slot.forced >= 0 ? slot.forced : best_node(s, t);
  if constexpr (K <= kEncodeCoarseBits)
    tracer.trace_coarse(node);
  else
    tracer.trace(node);
  const int at = slot.forced >= 0 ? 0 : tracer.closed_at();
  if (threadIdx.x % 32) return;
  s.closed[t] = at;
  if (at < 0)
    tracer.go_on();
  else
    s.following[t] = static_cast<int64_t>(atomicAdd(next, 1ull));
}

// Traces the slots that have reached their goal; each gets its next tile or goes on.
template <int K, int T>
static __device__ __noinline__ void arrive(const EncodeParams& p, SharedOf<K, T>& s,
                                           unsigned char* ring, unsigned long long* next,
                                           int clock) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int t = 0; t < T; ++t) {
    if (threadIdx.x == 0) s.closed[t] = -1;
    if (!arrives(s.slot[t], clock)) continue;
    find_best(s, clock, t);
  }
  __syncthreads();
  if (warp < T && arrives(s.slot[warp], clock)) {
    Slot& slot = s.slot[warp];
    Tracer<K, T> tracer{p, slot, ring, warp, lane, clock - slot.begin};
    trace_slot<K, T>(s, tracer, warp, next);
  }
  __syncthreads();
  for (int t = 0; t < T; ++t) {
    if (s.closed[t] < 0) continue;
    Slot& slot = s.slot[t];
    Tracer<K, T>{p, slot, ring, t, lane, clock - slot.begin}.write(s.closed[t]);
    __syncthreads();
    load_tile<K>(p, slot, s.following[t], false);
  }
  __syncthreads();
  begin_walks<K, T>(s, ring, clock);
}

// Puts the thread's part of the table where it belongs.
template <int K, int T>
static __device__ __forceinline__ void place_table(const EncodeParams& p,
                                                   uint32_t (&mine)[Plan<K, T>::kInRegisters],
                                                   Shared<K, T>& s) {
  using P = Plan<K, T>;
  const int tid = threadIdx.x;
  const auto number = [&](int e, int i) {
    return static_cast<uint16_t>(p.table[2 * P::table_at_own(tid, e) + i]);
  };
  const auto word = [&](int i) {
    const uint32_t low = number(2 * i, P::kTagged);
    const uint32_t high = number(2 * i + 1, P::kTagged);
    return low | high << 16;
  };
#pragma unroll
  for (int i = 0; i < P::kInRegisters; ++i) mine[i] = word(i);
#pragma unroll 1
  for (int i = P::kInRegisters; i < P::kTable; i += 4)
    s.table[(i - P::kInRegisters) / 4][tid] = {word(i), word(i + 1), word(i + 2), word(i + 3)};
}

// Of the workspace of a block that keeps its shared memory there.
template <int K, int T>
constexpr int64_t kInGlobalBytes = (sizeof(SharedOf<K, T>) + 255) / 256 * 256;

// Rates at which some device has too little of it: compute capability 7.5 has 64 KB.
template <int K>
constexpr bool kMayBeGlobal = sizeof(SharedOf<K, 1>) > 64 * 1024;

// A step of N tiles from the first on: all, or the only one that is left.
template <int K, int T, int N>
static __device__ __forceinline__ void advance(const uint32_t (&mine)[Plan<K, T>::kInRegisters],
                                               Shared<K, T>& s, int clock, int first, int now,
                                               int after, unsigned char* row) {
  int32_t least[N];
  Pull pulls[N];
#pragma unroll
  for (int t = 0; t < N; ++t) pulls[t] = pull<K>(s.slot[first + t], clock, s.low[now][first + t]);
  step<K, T, N>(mine, s, pulls, least, first, clock & 1, row);
#pragma unroll
  for (int t = 0; t < N; ++t) {
    least[t] = warp_min(least[t]);
    if (threadIdx.x % 32 == 0) atomicMin(&s.low[after][first + t], least[t]);
  }
}

template <int K, int T, bool kInGlobal>
__global__ void __launch_bounds__(kSearchThreads, 1)
    search_kernel(EncodeParams p, SearchHeader* header, unsigned char* blocks) {
  using P = Plan<K, T>;
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int64_t kMore = kInGlobal ? kInGlobalBytes<K, T> : 0;
  unsigned char* ring = blocks + blockIdx.x * (P::kBlockBytes + kMore);
  Shared<K, T>& s = *reinterpret_cast<Shared<K, T>*>(kInGlobal ? ring + P::kBlockBytes : memory);
  uint32_t mine[P::kInRegisters];
  place_table<K, T>(p, mine, s);
  for (int t = 0; t < T; ++t) load_tile<K>(p, s.slot[t], int64_t{t} * gridDim.x + blockIdx.x, true);
  __syncthreads();
  begin_walks<K, T>(s, ring, 0);
  int now = 0, after = 1, later = 2;  // of the three least costs
  if (threadIdx.x < T) s.low[after][threadIdx.x] = kEncodeCap;
  __syncthreads();
  for (int clock = 0;; ++clock) {
    // Keeps the compiler from unpacking the table ahead of the loop, into registers it lacks.
#pragma unroll
    for (uint32_t& two : mine) asm volatile("" : "+r"(two));
    if (clock == s.event) {
      arrive<K, T>(p, s, ring, &header->next, clock);
      if (s.event == INT32_MAX) break;
    }
    unsigned char* row = ring + (clock & kRingMask) * P::kRowBytes;
    if (T > 1 && s.alone >= 0)
      advance<K, T, 1>(mine, s, clock, s.alone, now, after, row);
    else
      advance<K, T, T>(mine, s, clock, 0, now, after, row);
    if (threadIdx.x < T) s.low[later][threadIdx.x] = kEncodeCap;
    const int spare = now;
    now = after, after = later, later = spare;
    __syncthreads();
  }
}

// The same at 1 to 3 bits.
template <int K, int T, bool kInGlobal>
__global__ void __launch_bounds__(kSearchThreads, 1)
    coarse_kernel(EncodeParams p, SearchHeader* header, unsigned char* blocks) {
  using P = CoarsePlan<K, T>;
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int64_t kMore = kInGlobal ? kInGlobalBytes<K, T> : 0;
  unsigned char* ring = blocks + blockIdx.x * (P::kBlockBytes + kMore);
  auto& s = *reinterpret_cast<CoarseShared<K, T>*>(kInGlobal ? ring + P::kBlockBytes : memory);
  uint32_t mine[P::kTable];
#pragma unroll
  for (int i = 0; i < P::kTable; ++i) {
    const int h = i / P::kFan % P::kFan;
    const int node = P::node(threadIdx.x, i / (P::kFan * P::kFan)) + i % P::kFan;
    const auto half = [&](int of) { return coarse_half(p.table[encode_coarse_place(K, h, of)]); };
    mine[i] = half(node) | half(node + P::kFan) << 16;
  }
  for (int t = 0; t < T; ++t) load_tile<K>(p, s.slot[t], int64_t{t} * gridDim.x + blockIdx.x, true);
  __syncthreads();
  begin_walks<K, T>(s, ring, 0);
  for (int clock = 0;; ++clock) {
    if (clock == s.event) {
      arrive<K, T>(p, s, ring, &header->next, clock);
      if (s.event == INT32_MAX) break;
    }
#pragma unroll 1
    for (int t = 0; t < T; ++t) {
      if (s.slot[t].tile < 0) continue;
      const int after = clock + 1 - s.slot[t].begin;
      uint32_t* row = after % P::kStride
                          ? nullptr
                          : reinterpret_cast<uint32_t*>(ring_row<K, T>(ring, t, after));
      const CoarsePull drawn = coarse_pull<K, T>(s, t, clock);
      const uint32_t* from = s.cost[clock & 1][t];
      uint32_t* to = s.cost[clock & 1 ^ 1][t];
      int* reference = &s.reference[clock & 1 ^ 1][t];
      if (drawn.wide)
        coarse_step<K, T, true>(mine, from, to, drawn, row, reference);
      else
        coarse_step<K, T, false>(mine, from, to, drawn, row, reference);
    }
    __syncthreads();
  }
}

}  // namespace exl3::cuda
