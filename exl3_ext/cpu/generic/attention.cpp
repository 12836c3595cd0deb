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

}  // namespace

void attention_task(const AttentionParams& p, const AttentionTask& t, float* partial,
                    float* scratch) {
  float* k = scratch;
  float* v = k + kAttentionKeys * p.head_dim;
  float* sums = v + kAttentionKeys * p.v_head_dim;
  float* turned = sums + kAttentionRows * p.v_head_dim;  // rotated queries of a quantised cache
  const int64_t rows = t.row_end - t.row_begin;
  Row state[kAttentionRows];
  const float* query[kAttentionRows];
  for (int64_t r = 0; r < rows; ++r) {
    state[r] = {sums + r * p.v_head_dim, kMinusInf, 0.0f};
    for (int i = 0; i < p.v_head_dim; ++i) state[r].sum_v[i] = 0;
    query[r] = query_row(p, t.sequence, t.kv_head, t.row_begin + r);
    if (!p.k_quant.bits) continue;
    float* own = turned + r * p.head_dim;
    for (int i = 0; i < p.head_dim; ++i) own[i] = query[r][i];
    rotate_blocks(own, p.head_dim);
    query[r] = own;
  }
  for (int64_t key = t.key_begin; key < t.key_end;) {
    const Block block{k, v, key, block_end(key, t.key_end)};
    const int64_t slot = cache_slot(p, t.sequence, key), n = block.end - block.begin;
    const int64_t first = slot * p.kv_heads + t.kv_head;
    convert(p.k_cache, p.k_quant, first, p.kv_heads, p.head_dim, n, k);
    convert(p.v_cache, p.v_quant, first, p.kv_heads, p.v_head_dim, n, v);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = t.row_begin + r;
      const KeyRange seen = visible_keys(p, t.sequence, row / group_size(p));
      step(p, query[r], seen, block, state[r]);
    }
    key = block.end;
  }
  for (int64_t r = 0; r < rows; ++r) {
    const Row& s = state[r];
    const float scale = s.sum > 0 ? 1.0f / s.sum : s.sum;  // no key: 0; NaN stays
    float* out = t.partial < 0 ? output_row(p, t.sequence, t.kv_head, t.row_begin + r)
                               : partial + t.partial + r * partial_stride(p);
    for (int i = 0; i < p.v_head_dim; ++i) out[i] = t.partial < 0 ? s.sum_v[i] * scale : s.sum_v[i];
    if (t.partial < 0) {
      if (p.v_quant.bits) rotate_blocks(out, p.v_head_dim);
      continue;
    }
    out[p.v_head_dim] = s.max;
    out[p.v_head_dim + 1] = s.sum;
  }
}

void attention_merge(const AttentionParams& p, const AttentionMerge& m, const float* partial) {
  const int64_t rows = m.row_end - m.row_begin, stride = partial_stride(p);
  const int dim = p.v_head_dim;
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = partial + m.partial + r * stride;
    float top = kMinusInf, sum = 0;
    for (int c = 0; c < m.chunks; ++c) top = std::fmax(top, from[c * rows * stride + dim]);
    float* out = output_row(p, m.sequence, m.kv_head, m.row_begin + r);
    for (int i = 0; i < dim; ++i) out[i] = 0;
    for (int c = 0; c < m.chunks; ++c) {
      const float* part = from + c * rows * stride;
      if (part[dim] == kMinusInf) continue;  // no key in this chunk
      const float weight = std::exp(part[dim] - top);
      sum += weight * part[dim + 1];
      for (int i = 0; i < dim; ++i) out[i] += weight * part[i];
    }
    const float scale = sum > 0 ? 1.0f / sum : sum;
    for (int i = 0; i < dim; ++i) out[i] *= scale;
    if (p.v_quant.bits) rotate_blocks(out, dim);
  }
}

}  // namespace exl3::generic
