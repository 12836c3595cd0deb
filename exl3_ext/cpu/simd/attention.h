// Attention over vectors. Included by attention.cpp of each level, after its math.h.
#pragma once
#include "cpu/attention.h"
#include "cpu/simd/kv_dequantise.h"
#include "cpu/simd/span.h"
// After span.h, whose helpers they use.
#include "cpu/simd/attention_block.h"
#include "cpu/simd/attention_few.h"

namespace exl3::EXL3_LEVEL {

// Folds the result of a chunk of keys into that of all before it.
static void fold_rows(const AttentionParams& p, float* all, const float* chunk, int64_t rows) {
  const int64_t stride = partial_stride(p);
  const int dim = p.v_head_dim;
  for (int64_t r = 0; r < rows; ++r, all += stride, chunk += stride) {
    const float top = chunk[dim] > all[dim] ? chunk[dim] : all[dim];
    const vec base = vset(top == -__builtin_inff() ? 0.0f : top);  // of rows that saw no key yet
    const vec keep = vexp(vset(all[dim]) - base), weight = vexp(vset(chunk[dim]) - base);
    each_vector(dim, [&](int64_t i, int n) {
      store_n(all + i, vfma(load_n(chunk + i, n), weight, load_n(all + i, n) * keep), n);
    });
    float sum[kLanes];
    vstore(sum, vfma(vset(chunk[dim + 1]), weight, vset(all[dim + 1]) * keep));
    all[dim] = top;
    all[dim + 1] = sum[0];
  }
}

// Rows of p.out from the results of all their keys.
static void finish_rows(const AttentionParams& p, int sequence, int kv_head, int64_t row_begin,
                        int64_t row_end, const float* all) {
  for (int64_t row = row_begin; row < row_end; ++row, all += partial_stride(p)) {
    const float sum = all[p.v_head_dim + 1];
    float* out = output_row(p, sequence, kv_head, row);
    const float scale = sum > 0 ? 1.0f / sum : sum;  // no key: 0; NaN stays
    scale_row(all, out, p.v_head_dim, scale, nullptr, 0.0f);
    if (p.v_quant.bits) rotate_blocks(out, p.v_head_dim);
  }
}

static void clear_rows(const AttentionParams& p, float* all, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r, all += partial_stride(p)) {
    each_vector(p.v_head_dim, [&](int64_t i, int n) { store_n(all + i, vzero(), n); });
    all[p.v_head_dim] = -__builtin_inff();
    all[p.v_head_dim + 1] = 0;
  }
}

// Chunk by chunk: run(begin, end, result).
template <class F>
static void each_chunk(const AttentionParams& p, const AttentionTask& t, float* partial, float* all,
                       const F& run) {
  const int64_t rows = t.row_end - t.row_begin, size = rows * partial_stride(p);
  float* to = t.partial >= 0 ? partial + t.partial : all;
  for (int64_t key = t.key_begin; key < t.key_end;) {
    const int64_t end = chunk_end(key, t.key_end);
    run(key, end, to);
    if (t.partial < 0 && to != all) fold_rows(p, all, to, rows);
    if (t.partial >= 0)
      to += size;
    else
      to = all + size;
    key = end;
  }
  if (t.partial >= 0) return;
  if (t.key_begin >= t.key_end) clear_rows(p, all, rows);
  finish_rows(p, t.sequence, t.kv_head, t.row_begin, t.row_end, all);
}

static void attention_task(const AttentionParams& p, const AttentionTask& t, float* partial,
                           float* scratch) {
  float* all = scratch;
  scratch += 2 * kAttentionRows * partial_stride(p);
  if (t.row_end - t.row_begin <= kFewRows) {
    FewRows f;
    few_queries(p, t, f, scratch);
    each_chunk(p, t, partial, all,
               [&](int64_t begin, int64_t end, float* to) { few_chunk(p, t, f, begin, end, to); });
    return;
  }
  BlockRows f;
  block_queries(p, t, f, scratch);
  each_chunk(p, t, partial, all,
             [&](int64_t begin, int64_t end, float* to) { block_chunk(p, t, f, begin, end, to); });
}

static void attention_merge(const AttentionParams& p, const AttentionMerge& m, float* partial) {
  const int64_t rows = m.row_end - m.row_begin, size = rows * partial_stride(p);
  float* all = partial + m.partial;
  for (int c = 1; c < m.chunks; ++c) fold_rows(p, all, all + c * size, rows);
  finish_rows(p, m.sequence, m.kv_head, m.row_begin, m.row_end, all);
}

}  // namespace exl3::EXL3_LEVEL
