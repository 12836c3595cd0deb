// From accumulators to the output: over the warps of a block, then over the chunks of a tile.
#pragma once
#include "cuda/attention/problem.cuh"
#include "cuda/attention/tiles.cuh"

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

// Parts of one row in shared memory: value (part, row, column), maximum and sum (part, row).
struct SharedParts {
  const float *values, *maxima, *sums;
  int parts, rows, dim;
};

// Writes the tile's rows: to the output if it is the only chunk, else to its place in `partials`.
static __device__ __forceinline__ void write_rows(const AttentionCudaParams& p, const Tile& t,
                                                  int kv_head, float* partial,
                                                  const SharedParts& s) {
  const int v_dim = p.a.v_head_dim;
  for (int i = threadIdx.x; i < t.rows * v_dim; i += blockDim.x) {
    const int r = i / v_dim, column = i % v_dim;
    float top = -INFINITY, sum = 0.0f, value = 0.0f;
    for (int w = 0; w < s.parts; ++w) top = fmaxf(top, s.maxima[w * s.rows + r]);
    for (int w = 0; w < s.parts; ++w) {
      const float weight = part_weight(s.maxima[w * s.rows + r], top);
      sum = fmaf(weight, s.sums[w * s.rows + r], sum);
      value = fmaf(weight, s.values[(w * s.rows + r) * s.dim + column], value);
    }
    if (!partial) {
      const int64_t at = row_offset(p.a, t, kv_head, r, int64_t{p.a.q_heads} * v_dim, v_dim);
      put_output(p, at + column, sum == 0.0f ? 0.0f : value / sum);
      continue;
    }
    partial[i] = value;
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
  for (int i = threadIdx.x; i < t.rows * v_dim; i += blockDim.x) {
    const int r = i / v_dim;
    float value = 0.0f;
#pragma unroll 8
    for (int c = 0; c < chunks; ++c) {
      value = fmaf(weights[r * kMostChunks + c], __ldcg(first + c * stride + i), value);
    }
    const int64_t at = row_offset(p.a, t, kv_head, r, int64_t{p.a.q_heads} * v_dim, v_dim);
    put_output(p, at + i % v_dim, value);
  }
}

}  // namespace exl3::cuda
