// A decode step of attention in one launch: head norms and rotation of the new rows, their keys and
// values into the cache, out = softmax(softcap(scale * q k^T) + mask) v over the cache and them.
//
// Work split: a cluster of 1..16 thread blocks has up to 16 rows (queries times q heads) of one kv
// head of a sequence; each thread block takes some parts of the keys (`DecodeSpan`), a warp every
// fourth step of 16 keys, by its own copies, with no barrier among warps. Every thread block
// prepares q for itself, that of the last part also the new keys. Sums of parts meet in the shared
// memory of the thread blocks of the cluster, each of which finishes a share of the columns.
// Memory: 64 KB of keys at head dim 128, 8 KB of new keys, the sums. Bound: bytes of K and V; in a
// short context the chain of latencies from q to the output (doc/kernels/attention_cuda.md), and
// with it the instructions on that chain, each of which is fetched once: loops are kept rolled.
// Chosen: `plan_decode_attention`.
//
// The next launch may start at once (programmatic launch). With `ahead` keys are fetched while the
// launch before ends; nothing that it may have written is read before it is complete.
#pragma once
#include "cuda/attention/decode_rows.cuh"

namespace exl3::cuda {

// Which keys the rows see whose scores a lane has.
template <int D, int kTiles>
static __device__ __forceinline__ void set_limits(DecodeState<D, kTiles>& state,
                                                  const DecodeAttentionParams& p,
                                                  const DecodeRows& own, const DecodeSpan& span) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = t * 8 + threadIdx.x % 4 * 2 + i;
      const int position = span.before + (own.row0 + r) / own.group;
      const int seen = p.window ? position - p.window + 1 : 0;
      state.low[t][i] = seen > 0 ? seen : 0;
      state.high[t][i] = r >= own.rows || position < 0 ? 0 : p.causal ? position + 1 : span.length;
    }
  }
}

// Norm weights to shared memory, zeros past the head dim.
template <int D>
static __device__ __forceinline__ void copy_norms(const DecodeAttentionParams& p, float* to) {
  for (int i = threadIdx.x; i < D; i += kDecodeThreads) {
    if (p.q_norm) to[i] = i < p.head_dim ? p.q_norm[i] : 0.0f;
    if (p.k_norm) to[D + i] = i < p.head_dim ? p.k_norm[i] : 0.0f;
  }
}

// The warp's steps [step, last) and before them the new rows, if it has them. Steps below 0 only
// start copies.
template <int D, int kTiles>
static __device__ __forceinline__ void run_part(DecodeState<D, kTiles>& state, DecodeKeys<D>& keys,
                                                const DecodeAttentionParams& p,
                                                const DecodeSpan& span, int step, int last,
                                                const __half* fresh) {
  const float scale = p.softcap > 0.0f ? p.scale / p.softcap : p.scale * kLog2Of_e;
  bool is_new = fresh != nullptr;
  state.clear();
#pragma unroll 1
  while (is_new || step < last) {
    const __half* k = is_new ? fresh : keys.place(step);
    const int key0 = is_new ? span.before : keys.key(step), end = is_new ? span.length : keys.end;
    if (!is_new) copy_wait<kDecodeStages - 1>();
    __syncwarp();
    if (is_new || (step >= 0 && keys.known(step))) {
      float s[kTiles][4];
      state.scores(s, k, key0, end, scale, p.softcap);
      state.weigh(s);
      state.add_values(s, k + DecodeKeys<D>::kHalves);
    }
    __syncwarp();
    if (!is_new) keys.load(step++ + kDecodeStages);
    is_new = false;
  }
}

// One thread block's work, `rank` of its cluster; `item` is the cluster's. `wait` returns once the
// rows of qkv are there.
template <class T, int D, int kTiles, class Wait>
static __device__ __forceinline__ void decode_attention_block(const DecodeAttentionParams& p,
                                                              unsigned char* room, int item,
                                                              int rank, const Wait& wait) {
  using Shape = DecodeShape<D, kTiles>;
  if (!p.ahead) wait();
  const DecodeRows own(p, item, Shape::kRows);
  const DecodeSpan span(p, own.sequence);
  const DecodeShare share(p.v_head_dim, p.cluster);
  const DecodeMemory memory = Shape::memory(room, own.rows, share, p.cluster);
  const int warp = threadIdx.x / kWarp, each = span.each, first = rank * each;
  const int senders = (span.parts + each - 1) / each;
  if (threadIdx.x == 0) {
    counted_start(memory.barrier, senders * own.rows * share.own(rank) * 24);
  }
  __syncwarp();
  cluster_meet_arrive();
  DecodeKeys<D> keys(p, own.sequence, own.kv_head, memory.keys + warp * Shape::kWarpHalves);
  keys.set(span, first, each);
  int made;  // the first of its keys that other sequences bring
  const int brought = span.brought_keys(first, each, made);
  if (brought <= 0) keys.start();
  copy_norms<D>(p, memory.norms);
  const bool has_keys = span.fresh / each == rank;
  using Task = RowTask<T, D, kTiles>;
  Task task(p, own, has_keys, memory, Task::lane_query(p, own));
  DecodeState<D, kTiles> state;
  set_limits(state, p, own, span);
  cluster_wait();
  __syncthreads();
  if (p.ahead) wait();
  if (first < span.parts) {
    task.run(p);
    if (brought > 0) {
      const int64_t line = own.line(p, 0) - (span.old - made);
      bring_keys<T, D, kTiles>(p, own.kv_head, memory.norms, line, brought);
    }
    __syncthreads();
    state.load_rows(memory.q);
    const int count = span.parts - first < each ? span.parts - first : each;
    const int rounds = span.size / kRoundKeys, levels = Shape::levels(p.cluster);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int last = keys.steps < (i + 1) * rounds ? keys.steps : (i + 1) * rounds;
      const bool takes_new = has_keys && warp == kDecodeWarps - 1 && first + i == span.fresh;
      const int step = i == 0 && brought > 0 ? -kDecodeStages : i * rounds;
      run_part(state, keys, p, span, step, last, takes_new ? memory.fresh : nullptr);
      if (i > 0) __syncthreads();  // the part before has been added
      state.save(memory.parts + warp * own.rows * Shape::kPitch, memory.bases + warp * 16,
                 own.rows);
      __syncthreads();
      add_part<D, kTiles>(memory, share, own.rows, i, i == count - 1, levels, rank);
    }
  }
  if (share.own(rank) == 0) return;
  counted_wait(memory.barrier);
  write_outputs<T>(p, own.rows, memory, share, rank, senders);
}

template <class T, int D, int kTiles>
__global__ void __launch_bounds__(kDecodeThreads, 2)
    decode_attention_kernel(const __grid_constant__ DecodeAttentionParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  cudaTriggerProgrammaticLaunchCompletion();
  const int rank = blockIdx.x % p.cluster;
  decode_attention_block<T, D, kTiles>(p, shared, blockIdx.x / p.cluster, rank,
                                       [] { cudaGridDependencySynchronize(); });
#endif
}

}  // namespace exl3::cuda
