// What the attention launcher hands to the kernels of a level.
//
// A "row" of a sequence is one query of one head of a group: row = query * group + head in group,
// so that all rows of a task share the K and V of one kv head.
//
// A row's result has the same bits whatever other rows, tasks and threads there are. Its keys are
// cut at fixed positions: blocks of 64 in chunks of 256. The result of a chunk starts from nothing;
// chunks are folded one after another. Within a block every kernel of a level adds in one order: a
// score by lanes of the head and then across them (`vsums`), the sum of e by lanes of the keys and
// then across them, the sum of e * v key by key.
#pragma once
#include "exl3/attention.h"

namespace exl3 {

constexpr int kAttentionRows = 64;    // most rows of a task
constexpr int kAttentionKeys = 64;    // keys of a block: divides a page, so a block has one page
constexpr int kAttentionChunk = 256;  // keys of a chunk

// Rows [row_begin, row_end) over keys [key_begin, key_end), each row masked to what it sees.
struct AttentionTask {
  int64_t row_begin, row_end;
  int64_t key_begin, key_end;
  int64_t partial;  // where the results of its chunks go; < 0: write the finished rows to p.out
  int sequence, kv_head;
};

// Folds the results of `chunks` chunks of the same rows, stored one after another, into p.out.
struct AttentionMerge {
  int64_t row_begin, row_end;
  int64_t partial;  // of the first chunk
  int sequence, kv_head, chunks;
};

// The result of a chunk is [rows, partial_stride] floats. A row holds sum(e * v) over its keys,
// then at v_head_dim the greatest score and at v_head_dim + 1 the sum of e, with e = exp(score -
// greatest).
static inline int64_t partial_stride(const AttentionParams& p) { return (p.v_head_dim + 17) & ~15; }

// Floats of scratch memory that a task needs, whatever the level: Q, S, K, V, O blocks, and the
// results of two chunks.
static inline int64_t attention_scratch(const AttentionParams& p) {
  const int64_t dims = p.head_dim + p.v_head_dim + 32;
  return dims * (kAttentionRows + kAttentionKeys) + kAttentionRows * (kAttentionKeys + 8) +
         2 * kAttentionRows * partial_stride(p);
}

struct KeyRange {
  int64_t begin, end;
};

// The keys that query `i` of sequence `b` sees.
static inline KeyRange visible_keys(const AttentionParams& p, int64_t b, int64_t i) {
  const int64_t length = p.seq_lens[b];
  const int64_t position = length - (p.query_starts[b + 1] - p.query_starts[b]) + i;
  if (position < 0) return {0, 0};
  const int64_t begin = p.window > 0 && position >= p.window ? position - p.window + 1 : 0;
  return {begin, p.causal ? position + 1 : length};
}

static inline int group_size(const AttentionParams& p) { return p.q_heads / p.kv_heads; }

static inline const float* query_row(const AttentionParams& p, int64_t b, int64_t h, int64_t row) {
  const int group = group_size(p);
  const int64_t head = h * group + row % group;
  return p.q + (p.query_starts[b] + row / group) * p.q_stride + head * p.head_dim;
}

static inline float* output_row(const AttentionParams& p, int64_t b, int64_t h, int64_t row) {
  const int group = group_size(p);
  const int64_t head = h * group + row % group;
  return p.out + ((p.query_starts[b] + row / group) * p.q_heads + head) * p.v_head_dim;
}

// Index of key `t` of sequence b in units of [kv_heads] rows of the cache.
static inline int64_t cache_slot(const AttentionParams& p, int64_t b, int64_t t) {
  const int64_t page = p.page_table[b * p.max_pages + t / kPageSize];
  return page * kPageSize + t % kPageSize;
}

static inline int64_t block_end(int64_t key, int64_t key_end) {
  const int64_t end = (key / kAttentionKeys + 1) * kAttentionKeys;
  return end < key_end ? end : key_end;
}

static inline int64_t chunk_end(int64_t key, int64_t key_end) {
  const int64_t end = (key / kAttentionChunk + 1) * kAttentionChunk;
  return end < key_end ? end : key_end;
}

}  // namespace exl3
