// Attention of one task: blocks of keys are converted to float32 once for all rows, then each row
// takes its scores and an online softmax step.
#include "cpu/generic/attention.h"

#include <cmath>

#include "cpu/generic/half.h"
#include "cpu/generic/kv_quant.h"

namespace exl3::generic {
namespace {

constexpr float kMinusInf = -INFINITY;

// Keys of one block, converted.
struct Block {
  const float* k;  // [keys, head_dim]
  const float* v;  // [keys, v_head_dim]
  int64_t begin, end;
};

struct Row {
  float* sum_v;  // [v_head_dim]
  float max, sum;
};

// n rows of one head, the first of them `row`, the others `step` apart.
void convert(const half_bits* cache, const QuantRows& quant, int64_t row, int64_t step, int dim,
             int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i, row += step, to += dim) {
    if (quant.bits)
      dequantise_row(quant, row, dim, to);
    else
      for (int c = 0; c < dim; ++c) to[c] = half_to_float(cache[row * dim + c]);
  }
}

void step(const AttentionParams& p, const float* q, KeyRange seen, const Block& b, Row& row) {
  float score[kAttentionKeys];
  const int64_t begin = seen.begin > b.begin ? seen.begin : b.begin;
  const int64_t end = seen.end < b.end ? seen.end : b.end;
  if (begin >= end) return;
  float top = row.max;
  for (int64_t t = begin; t < end; ++t) {
    const float* k = b.k + (t - b.begin) * p.head_dim;
    float dot = 0;
    for (int i = 0; i < p.head_dim; ++i) dot += q[i] * k[i];
    dot *= p.scale;
    if (p.softcap > 0) dot = p.softcap * std::tanh(dot / p.softcap);
    score[t - begin] = dot;
    if (dot > top) top = dot;
  }
  const float keep = std::exp(row.max - top);
  row.sum *= keep;
  for (int i = 0; i < p.v_head_dim; ++i) row.sum_v[i] *= keep;
  for (int64_t t = begin; t < end; ++t) {
    const float e = std::exp(score[t - begin] - top);
    const float* v = b.v + (t - b.begin) * p.v_head_dim;
    row.sum += e;
    for (int i = 0; i < p.v_head_dim; ++i) row.sum_v[i] += e * v[i];
  }
  row.max = top;
}

// What a task works on.
struct Work {
  float *k, *v, *turned, *all;
  const float* query[kAttentionRows];
};

// The result of keys [begin, end) of one chunk.
void run_chunk(const AttentionParams& p, const AttentionTask& t, const Work& w, int64_t begin,
               int64_t end, float* to) {
  const int64_t rows = t.row_end - t.row_begin;
  Row state[kAttentionRows];
  for (int64_t r = 0; r < rows; ++r) {
    state[r] = {to + r * partial_stride(p), kMinusInf, 0.0f};
    for (int i = 0; i < p.v_head_dim; ++i) state[r].sum_v[i] = 0;
  }
  for (int64_t key = begin; key < end;) {
    const Block block{w.k, w.v, key, block_end(key, end)};
    const int64_t slot = cache_slot(p, t.sequence, key), n = block.end - block.begin;
    const int64_t first = slot * p.kv_heads + t.kv_head;
    convert(p.k_cache, p.k_quant, first, p.kv_heads, p.head_dim, n, w.k);
    convert(p.v_cache, p.v_quant, first, p.kv_heads, p.v_head_dim, n, w.v);
    for (int64_t r = 0; r < rows; ++r) {
      const KeyRange seen = visible_keys(p, t.sequence, (t.row_begin + r) / group_size(p));
      step(p, w.query[r], seen, block, state[r]);
    }
    key = block.end;
  }
  for (int64_t r = 0; r < rows; ++r) {
    state[r].sum_v[p.v_head_dim] = state[r].max;
    state[r].sum_v[p.v_head_dim + 1] = state[r].sum;
  }
}

// Folds the result of a chunk of keys into that of all before it.
void fold_rows(const AttentionParams& p, float* all, const float* chunk, int64_t rows) {
  const int dim = p.v_head_dim;
  for (int64_t r = 0; r < rows; ++r, all += partial_stride(p), chunk += partial_stride(p)) {
    const float top = std::fmax(all[dim], chunk[dim]);
    const float base = top == kMinusInf ? 0.0f : top;  // of rows that saw no key yet
    const float keep = std::exp(all[dim] - base), weight = std::exp(chunk[dim] - base);
    for (int i = 0; i < dim; ++i) all[i] = all[i] * keep + chunk[i] * weight;
    all[dim] = top;
    all[dim + 1] = all[dim + 1] * keep + chunk[dim + 1] * weight;
  }
}

// Rows of p.out from the results of all their keys.
void finish_rows(const AttentionParams& p, const AttentionMerge& m, const float* all) {
  for (int64_t row = m.row_begin; row < m.row_end; ++row, all += partial_stride(p)) {
    const float sum = all[p.v_head_dim + 1];
    const float scale = sum > 0 ? 1.0f / sum : sum;  // no key: 0; NaN stays
    float* out = output_row(p, m.sequence, m.kv_head, row);
    for (int i = 0; i < p.v_head_dim; ++i) out[i] = all[i] * scale;
    if (p.v_quant.bits) rotate_blocks(out, p.v_head_dim);
  }
}

Work prepare(const AttentionParams& p, const AttentionTask& t, float* scratch) {
  Work w{};
  w.k = scratch;
  w.v = w.k + kAttentionKeys * p.head_dim;
  w.turned = w.v + kAttentionKeys * p.v_head_dim;  // rotated queries of a quantised cache
  w.all = w.turned + kAttentionRows * p.head_dim;
  for (int64_t r = 0; r < t.row_end - t.row_begin; ++r) {
    w.query[r] = query_row(p, t.sequence, t.kv_head, t.row_begin + r);
    if (!p.k_quant.bits) continue;
    float* own = w.turned + r * p.head_dim;
    for (int i = 0; i < p.head_dim; ++i) own[i] = w.query[r][i];
    rotate_blocks(own, p.head_dim);
    w.query[r] = own;
  }
  return w;
}

}  // namespace

void attention_task(const AttentionParams& p, const AttentionTask& t, float* partial,
                    float* scratch) {
  const Work w = prepare(p, t, scratch);
  const int64_t rows = t.row_end - t.row_begin, size = rows * partial_stride(p);
  if (t.partial >= 0) {
    float* to = partial + t.partial;
    for (int64_t key = t.key_begin; key < t.key_end; to += size) {
      const int64_t end = chunk_end(key, t.key_end);
      run_chunk(p, t, w, key, end, to);
      key = end;
    }
    return;
  }
  int64_t key = chunk_end(t.key_begin, t.key_end);
  run_chunk(p, t, w, t.key_begin, key, w.all);
  while (key < t.key_end) {
    const int64_t end = chunk_end(key, t.key_end);
    run_chunk(p, t, w, key, end, w.all + size);
    fold_rows(p, w.all, w.all + size, rows);
    key = end;
  }
  finish_rows(p, {t.row_begin, t.row_end, 0, t.sequence, t.kv_head, 1}, w.all);
}

void attention_merge(const AttentionParams& p, const AttentionMerge& m, float* partial) {
  const int64_t rows = m.row_end - m.row_begin, size = rows * partial_stride(p);
  float* all = partial + m.partial;
  for (int c = 1; c < m.chunks; ++c) fold_rows(p, all, all + c * size, rows);
  finish_rows(p, m, all);
}

}  // namespace exl3::generic
