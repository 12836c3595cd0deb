// From accumulators to the output: over the warps of a block, then over the chunks of a tile.
#pragma once
#include "cuda/attention/problem.cuh"
#include "cuda/attention/tiles.cuh"
#include "cuda/cache/kv_quant.cuh"

namespace exl3::cuda {

constexpr int kMostChunks = 32;

static __device__ __forceinline__ void put_output(const AttentionCudaParams& p, int64_t at,
                                                  float v) {
  if (p.dtype == DType::kFloat16)
    static_cast<__half*>(p.a.out)[at] = __float2half_rn(v);
  else
    static_cast<float*>(p.a.out)[at] = v;
}

// exp2(maximum - total); 0 for a part that saw no key.
static __device__ __forceinline__ float part_weight(float maximum, float total) {
  return maximum == -INFINITY ? (total == -INFINITY ? 1.0f : 0.0f) : exp2_fast(maximum - total);
}

// Values of a quantised cache come out rotated, and permuted in shared memory (`decoded_place`). A
// warp takes whole blocks of columns then, the last one filled up, so that it can turn them back.
template <bool kQuant>
static __device__ __forceinline__ int padded_columns(int dim) {
  return kQuant ? quant_blocks(dim) * kQuantBlock : dim;
}
template <bool kQuant>
static __device__ __forceinline__ int place_of_column(int column) {
  const int t = column % kQuantBlock;
  return kQuant ? column - t + decoded_place(t, column / kQuantBlock) : column;
}
template <bool kQuant>
static __device__ __forceinline__ float turned_back(float value, int column, int dim) {
  if (!kQuant) return value;
  return rotate_lanes(column < dim ? value : 0.0f, quant_block_size(dim, column / kQuantBlock));
}

// Parts of one row in shared memory: value (part, row, column), maximum and sum (part, row).
struct SharedParts {
  const float *values, *maxima, *sums;
  int parts, rows, dim;
};

// Writes the tile's rows: to the output if it is the only chunk, else to its place in `partials`.
template <bool kQuant>
static __device__ __forceinline__ void write_rows(const AttentionCudaParams& p, const Tile& t,
                                                  int kv_head, float* partial,
                                                  const SharedParts& s) {
  const int v_dim = p.a.v_head_dim, width = padded_columns<kQuant>(v_dim);
  for (int i = threadIdx.x; i < t.rows * width; i += blockDim.x) {
    const int r = i / width, column = i % width, place = place_of_column<kQuant>(column);
    float top = -INFINITY, sum = 0.0f, value = 0.0f;
    for (int w = 0; w < s.parts; ++w) top = fmaxf(top, s.maxima[w * s.rows + r]);
    for (int w = 0; w < s.parts; ++w) {
      const float weight = part_weight(s.maxima[w * s.rows + r], top);
      sum = fmaf(weight, s.sums[w * s.rows + r], sum);
      value = fmaf(weight, s.values[(w * s.rows + r) * s.dim + place], value);
    }
    if (!partial) {
      const int64_t at = row_offset(p.a, t, kv_head, r, int64_t{p.a.q_heads} * v_dim, v_dim);
      value = turned_back<kQuant>(sum == 0.0f ? 0.0f : value / sum, column, v_dim);
      if (column < v_dim) put_output(p, at + column, value);
      continue;
    }
    if (column >= v_dim) continue;
    partial[kQuant ? r * v_dim + column : i] = value;
    if (column == 0) {
      partial[p.tile_rows * v_dim + r] = top;
      partial[p.tile_rows * (v_dim + 1) + r] = sum;
    }
  }
}

// True in the block that came last of the tile's chunks.
static __device__ __forceinline__ bool is_last_chunk(unsigned* counter, int chunks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicInc(counter, chunks - 1) == static_cast<unsigned>(chunks - 1);
  }
  __syncthreads();
  __threadfence();
  return last;
}

// Sums all chunks in order. `weights` has room for kMostChunks * tile_rows floats.
template <bool kQuant>
static __device__ __forceinline__ void merge_chunks(const AttentionCudaParams& p, const Tile& t,
                                                    int kv_head, const float* first,
                                                    float* weights) {
  const int v_dim = p.a.v_head_dim, chunks = t.chunks;
  const int64_t stride = static_cast<int64_t>(p.tile_rows) * (v_dim + 2);
  const float* maxima = first + p.tile_rows * v_dim;
  const float* sums = maxima + p.tile_rows;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int r = warp; r < t.rows; r += blockDim.x / kWarp) {  // lane: chunk
    const float own = lane < chunks ? __ldcg(maxima + lane * stride + r) : -INFINITY;
    const float sum = lane < chunks ? __ldcg(sums + lane * stride + r) : 0.0f;
    float top = own;
#pragma unroll
    for (int h = kWarp / 2; h; h /= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, h));
    const float weight = part_weight(own, top);
    const float total = sum_of_warp(weight * sum);
    weights[r * kMostChunks + lane] = total == 0.0f ? 0.0f : weight / total;
  }
  __syncthreads();
  const int width = padded_columns<kQuant>(v_dim);
  for (int i = threadIdx.x; i < t.rows * width; i += blockDim.x) {
    const int r = i / width, column = i % width;
    const float* part = first + (kQuant ? r * v_dim + (column < v_dim ? column : 0) : i);
    float value = 0.0f;
#pragma unroll 8
    for (int c = 0; c < chunks; ++c) {
      value = fmaf(weights[r * kMostChunks + c], __ldcg(part + c * stride), value);
    }
    const int64_t at = row_offset(p.a, t, kv_head, r, int64_t{p.a.q_heads} * v_dim, v_dim);
    value = turned_back<kQuant>(value, column, v_dim);
    if (column < v_dim) put_output(p, at + column, value);
  }
}

}  // namespace exl3::cuda
