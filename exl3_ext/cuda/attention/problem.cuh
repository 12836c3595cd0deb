// Which rows and keys a block works on, read from lengths and starts on the device.
#pragma once
#include "cuda/common/vector.cuh"
#include "exl3/attention.h"

namespace exl3::cuda {

constexpr int kTileKeys = 64;     // divides a page: a tile of keys lies in one page
constexpr int kLeastChunk = 128;  // keys

// A tile: neighbouring rows of one sequence and kv head. Row r of a sequence is query r / group,
// q head r % group of the kv head.
struct Tile {
  int sequence, first_row, rows;
  int start, queries, length;  // of the sequence
  int begin, end;              // keys that some row sees
  int chunk, chunks;           // keys in a chunk, all but the first start `chunk` apart
};

static __device__ __forceinline__ bool find_sequence(const AttentionCudaParams& p, int64_t index,
                                                     Tile& t) {
  const Attention<void>& a = p.a;
  const int lane = threadIdx.x % kWarp, group = a.q_heads / a.kv_heads;
  for (int64_t base = 0; base < a.sequences; base += kWarp) {
    const int64_t b = base + lane;
    int start = 0, queries = 0;
    if (b < a.sequences) {
      start = a.query_starts[b];
      const int stop = a.query_starts[b + 1];
      if (start >= 0 && stop <= a.rows && stop > start) queries = stop - start;
    }
    const int tiles =
        static_cast<int>((static_cast<int64_t>(queries) * group + p.tile_rows - 1) / p.tile_rows);
    int64_t sum = tiles;
#pragma unroll
    for (int h = 1; h < kWarp; h *= 2) {
      const int64_t before = __shfl_up_sync(0xFFFFFFFFu, sum, h);
      if (lane >= h) sum += before;
    }
    const unsigned past = __ballot_sync(0xFFFFFFFFu, sum > index);
    if (past) {
      const int owner = __ffs(past) - 1;
      const int64_t first = __shfl_sync(0xFFFFFFFFu, sum - tiles, owner);
      t.sequence = static_cast<int>(base) + owner;
      t.start = __shfl_sync(0xFFFFFFFFu, start, owner);
      t.queries = __shfl_sync(0xFFFFFFFFu, queries, owner);
      t.first_row = static_cast<int>(index - first) * p.tile_rows;
      return true;
    }
    index -= __shfl_sync(0xFFFFFFFFu, sum, kWarp - 1);
  }
  return false;
}

// Tile `index` over all sequences; false if there are fewer.
static __device__ __forceinline__ bool find_tile(const AttentionCudaParams& p, int64_t index,
                                                 Tile& t) {
  if (!find_sequence(p, index, t)) return false;
  const Attention<void>& a = p.a;
  const int group = a.q_heads / a.kv_heads;
  const int left = t.queries * group - t.first_row;
  t.rows = left < p.tile_rows ? left : p.tile_rows;
  t.length = a.seq_lens[t.sequence];
  if (t.length < 0 || t.length > a.max_pages * kPageSize) t.length = 0;
  const int before = t.length - t.queries;
  const int first = before + t.first_row / group;
  const int last = before + (t.first_row + t.rows - 1) / group;
  t.end = last < 0 ? 0 : a.causal ? last + 1 : t.length;
  const int seen = a.window ? (first > 0 ? first : 0) - a.window + 1 : 0;
  t.begin = seen > 0 ? seen : 0;
  const int keys = t.end - t.begin / kTileKeys * kTileKeys;
  int chunk = (keys + p.max_chunks - 1) / p.max_chunks;
  if (chunk < kLeastChunk) chunk = kLeastChunk;
  t.chunk = (chunk + kTileKeys - 1) / kTileKeys * kTileKeys;
  t.chunks = p.max_chunks == 1 || keys <= 0 ? 1 : (keys + t.chunk - 1) / t.chunk;
  if (p.max_chunks == 1) t.chunk = keys > 0 ? keys : 1;
  return true;
}

// First element of the output row of row `r` of the tile, for one kv head.
static __device__ __forceinline__ int64_t row_offset(const Attention<void>& a, const Tile& t,
                                                     int kv_head, int r, int64_t stride, int dim) {
  const int group = a.q_heads / a.kv_heads, row = t.first_row + r;
  return (t.start + row / group) * stride +
         static_cast<int64_t>(kv_head * group + row % group) * dim;
}

// Rows that belong to no sequence become zero; one block does it.
static __device__ __forceinline__ void clear_other_rows(const AttentionCudaParams& p) {
  const Attention<void>& a = p.a;
  const int64_t width = static_cast<int64_t>(a.q_heads) * a.v_head_dim;
  const int64_t first = a.query_starts[0], last = a.query_starts[a.sequences];
  for (int64_t i = threadIdx.x; i < a.rows * width; i += blockDim.x) {
    if (first > 0 && i < first * width) {
    } else if (i < last * width) {
      i += (last * width - i - 1) / blockDim.x * blockDim.x;
      continue;
    }
    if (p.dtype == DType::kFloat16)
      static_cast<__half*>(a.out)[i] = __float2half_rn(0.0f);
    else
      static_cast<float*>(a.out)[i] = 0.0f;
  }
}

}  // namespace exl3::cuda
