// Attention over vectors. Included by attention.cpp of each level, after its math.h.
#pragma once
#include "cpu/attention.h"
#include "cpu/simd/kv_dequantise.h"
#include "cpu/simd/span.h"
// After span.h, whose helpers they use.
#include "cpu/simd/attention_block.h"
#include "cpu/simd/attention_few.h"

namespace exl3::EXL3_LEVEL {

static void attention_task(const AttentionParams& p, const AttentionTask& t, float* partial,
                           float* scratch) {
  if (t.row_end - t.row_begin <= kFewRows)
    attention_few(p, t, partial, scratch);
  else
    attention_block(p, t, partial, scratch);
}

static void attention_merge(const AttentionParams& p, const AttentionMerge& m,
                            const float* partial) {
  const int64_t rows = m.row_end - m.row_begin, stride = partial_stride(p), step = rows * stride;
  const int dim = p.v_head_dim;
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = partial + m.partial + r * stride;
    float top = -__builtin_inff();
    for (int c = 0; c < m.chunks; ++c) {
      if (from[c * step + dim] > top) top = from[c * step + dim];
    }
    float* out = output_row(p, m.sequence, m.kv_head, m.row_begin + r);
    float sum = 0;
    for (int c = 0; c < m.chunks; ++c) {
      const float* part = from + c * step;
      float weight[kLanes];
      vstore(weight, vexp(vset(part[dim]) - vset(top)));  // 0 for a chunk without keys
      sum += weight[0] * part[dim + 1];
      each_vector(dim, [&](int64_t i, int n) {
        const vec before = c ? load_n(out + i, n) : vzero();
        store_n(out + i, vfma(vset(weight[0]), load_n(part + i, n), before), n);
      });
    }
    scale_row(out, out, dim, sum > 0 ? 1.0f / sum : sum, nullptr, 0.0f);
    if (p.v_quant.bits) rotate_blocks(out, dim);
  }
}

}  // namespace exl3::EXL3_LEVEL
