// The trellis search of one bit rate: a thread block takes T tiles round their circles together.
//
// Work split: plan.cuh. Memory: a quarter of the register file and 64 to 128 KiB of shared memory
// hold the table; node costs are updated in place; choices (costs from 5 bits on) of the last 512
// steps go to global memory. Bound by the arithmetic pipes. A tile that closes is replaced by the
// next one, so results do not depend on which tiles share a block.
#pragma once
#include "cuda/encode/launch.h"
#include "cuda/encode/trace.cuh"

namespace exl3::cuda {

// Makes a tile the slot's next one. By one warp.
template <int K>
static __device__ void load_tile(const EncodeParams& p, Slot& slot, int64_t tile, int first) {
  constexpr int kGoal = kTileNumel + kEncodePatience[K].first;
  const int lane = threadIdx.x % 32;
  const bool there = tile < p.n_tiles;
  for (int i = lane; i < kTileNumel && (there || first); i += 32) {
    const float w = there ? p.tiles[tile * kTileNumel + i] : 0.0f;
    const float inside = fminf(fmaxf(w, -p.weight_limit), p.weight_limit);
    slot.weight[i] = static_cast<int16_t>(__float2int_rn(inside * p.weight_scale));
  }
  if (lane == 0) {
    slot.tile = there ? tile : -1;
    slot.origin = 0;
    slot.forced = -1;
    slot.restart = there || first ? -1 : -2;
    slot.goal = kGoal;
  }
  __syncwarp();
}

// Sets the costs of slots that start anew and finds the next event. By all threads.
template <int K, int T>
static __device__ void begin_walks(Shared<K, T>& s, unsigned char* row, int clock) {
  using P = Plan<K, T>;
  for (int t = 0; t < T; ++t) {
    const int start = s.slot[t].restart;
    if (start == -2) continue;
    for (int i = threadIdx.x; i < P::kNodes; i += kSearchThreads) {
      const int cost = (start < 0 || i == start ? 0 : kEncodeCap & -256) | P::tag(i);
      s.cost[P::place(i)].of[t] = cost;
      if constexpr (!P::kTagged) reinterpret_cast<Cost<T>*>(row)[i].of[t] = cost;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    s.event = INT32_MAX;
    for (int t = 0; t < T; ++t) {
      Slot& slot = s.slot[t];
      if (slot.restart != -2) {
        slot.begin = clock;
        slot.traced = 0;
        s.low[clock & 1][t] = 0;
        if (slot.restart >= 0) slot.goal = kTileNumel;
        slot.restart = -2;
      }
      if (slot.tile >= 0) s.event = min(s.event, slot.begin + slot.goal);
      s.best[t] = INT32_MAX;
    }
  }
  __syncthreads();
}

// Traces the slots that have reached their goal; each gets its next tile or goes on.
template <int K, int T>
static __device__ __noinline__ void arrive(const EncodeParams& p, Shared<K, T>& s,
                                           unsigned char* ring, unsigned long long* next,
                                           int clock) {
  using P = Plan<K, T>;
  for (int t = 0; t < T; ++t) {
    if (s.slot[t].begin + s.slot[t].goal != clock) continue;
    for (int i = threadIdx.x; i < P::kNodes; i += kSearchThreads)
      if (s.cost[P::place(i)].of[t] == s.low[clock & 1][t]) atomicMin(&s.best[t], i);
  }
  __syncthreads();
  const int t = threadIdx.x / 32;
  if (t < T && s.slot[t].tile >= 0 && s.slot[t].begin + s.slot[t].goal == clock) {
    Slot& slot = s.slot[t];
    const int lane = threadIdx.x % 32;
    Tracer<K, T> tracer{p, slot, ring, t, lane, clock - slot.begin};
    if (tracer.arrive(s.best[t])) {
      unsigned long long tile = 0;
      if (lane == 0) tile = atomicAdd(next, 1ull);
      load_tile<K>(p, slot, static_cast<int64_t>(__shfl_sync(kAll, tile, 0)), 0);
    }
  }
  __syncthreads();
  begin_walks<K, T>(s, ring + (clock & kRingMask) * P::kRowBytes, clock);
}

// Puts the thread's part of the table where it belongs.
template <int K, int T>
static __device__ __forceinline__ void place_table(const EncodeParams& p,
                                                   uint32_t (&mine)[Plan<K, T>::kInRegisters],
                                                   Shared<K, T>& s, uint4* rest) {
  using P = Plan<K, T>;
  const int tid = threadIdx.x;
  const auto pair = [&](int e) {
    const int at = 2 * P::table_at_own(tid, e);
    if constexpr (!P::kTagged) return static_cast<uint32_t>(p.table[at]);
    return *reinterpret_cast<const uint32_t*>(p.table + at);
  };
#pragma unroll
  for (int e = 0; e < P::kInRegisters; ++e) mine[e] = pair(e);
#pragma unroll 1
  for (int e = P::kInRegisters; e < kOwnStates; e += 4) {
    const int i = (e - P::kInRegisters) / 4;
    const uint4 quad{pair(e), pair(e + 1), pair(e + 2), pair(e + 3)};
    if (i < P::kInShared / 4)
      s.table[i][tid] = quad;
    else
      rest[(i - P::kInShared / 4) * kSearchThreads + tid] = quad;
  }
}

template <int K, int T>
__global__ void __launch_bounds__(kSearchThreads, 1)
    search_kernel(EncodeParams p, SearchHeader* header, unsigned char* blocks) {
  using P = Plan<K, T>;
  extern __shared__ __align__(16) unsigned char memory[];
  Shared<K, T>& s = *reinterpret_cast<Shared<K, T>*>(memory);
  unsigned char* ring = blocks + blockIdx.x * P::kBlockBytes;
  uint4* rest = reinterpret_cast<uint4*>(ring + kEncodeRing * P::kRowBytes);
  uint32_t mine[P::kInRegisters];
  place_table<K, T>(p, mine, s, rest);
  if (threadIdx.x / 32 < T) {
    const int t = threadIdx.x / 32;
    load_tile<K>(p, s.slot[t], int64_t{t} * gridDim.x + blockIdx.x, 1);
  }
  __syncthreads();
  begin_walks<K, T>(s, ring, 0);
  for (int clock = 0;; ++clock) {
    if (clock == s.event) {
      arrive<K, T>(p, s, ring, &header->next, clock);
      if (s.event == INT32_MAX) break;
    }
    Pull pulls[T];
    int32_t best[P::kMine][T];
#pragma unroll
    for (int t = 0; t < T; ++t) {
      pulls[t] = pull<K, T>(p, s.slot[t], clock, s.low[clock & 1][t]);
#pragma unroll
      for (int m = 0; m < P::kMine; ++m) best[m][t] = pulls[t].first;
    }
    int32_t* low = s.low[(clock + 1) & 1];
    if (threadIdx.x < T) low[threadIdx.x] = kEncodeCap;
    relax_all<K, T>(best, mine, s, rest, pulls, p.gain << K);
    __syncthreads();
    if constexpr (P::kSplit) {
      Cost<T>& half = s.half[threadIdx.x & 255];
#pragma unroll
      for (int t = 0; t < T; ++t)
        if (threadIdx.x >= 256) half.of[t] = best[0][t];
      __syncthreads();
#pragma unroll
      for (int t = 0; t < T; ++t) best[0][t] = min(best[0][t], half.of[t]);
    }
    if (!P::kSplit || threadIdx.x < 256)
      settle<K, T>(best, s, pulls, ring + (clock & kRingMask) * P::kRowBytes,
                   ring + ((clock + 1) & kRingMask) * P::kRowBytes, low);
    __syncthreads();
  }
}

template <int K, int T>
Status launch_tiles(const EncodeParams& p, int blocks, CudaStream stream) {
  auto* header = reinterpret_cast<SearchHeader*>(p.workspace);
  constexpr int kBytes = sizeof(Shared<K, T>);
  const auto kernel = search_kernel<K, T>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes) !=
      cudaSuccess) {
    cudaGetLastError();
    return Status::kNoKernel;
  }
  kernel<<<blocks, kSearchThreads, kBytes, stream>>>(p, header, p.workspace + kHeaderBytes);
  return cudaPeekAtLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

template <int K>
Status launch_search(const EncodeParams& p, const SearchShape& shape, CudaStream stream) {
  constexpr int kMost = most_tiles(K);
  if (shape.tiles == kMost) return launch_tiles<K, kMost>(p, shape.blocks, stream);
  return launch_tiles<K, kMost == 1 ? 1 : kMost / 2>(p, shape.blocks, stream);
}

template <int K>
int64_t search_block_bytes(int tiles) {
  constexpr int kMost = most_tiles(K);
  return tiles == kMost ? Plan<K, kMost>::kBlockBytes : Plan < K,
         kMost == 1 ? 1 : kMost / 2 > ::kBlockBytes;
}

}  // namespace exl3::cuda
