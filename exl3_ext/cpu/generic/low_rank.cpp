#include "cpu/low_rank.h"

namespace exl3::generic {

void low_rank_inner(const LowRankParams& p, const LowRankInner& t) {
  const LowRankPart& part = p.part[t.part];
  int active[kLowRankRows];
  const int n = active_rows(p, part, t.row, t.rows, active);
  for (int j = 0; j < n; ++j) {
    const int64_t row = t.row + active[j];
    const float* x = p.x + row * p.x_stride;
    for (int q = 0; q < t.ranks; ++q) {
      const float* a = part.a + (t.rank + q) * p.k;
      float sum = 0.0f;
      for (int64_t i = 0; i < p.k; ++i) sum += x[i] * a[i];
      p.inner[row * p.ranks + part.first_rank + t.rank + q] = sum;
    }
  }
}

void low_rank_block(const LowRankParams& p, const LowRankBlock& b) {
  for (int i = b.first; i < b.last; ++i) {
    const LowRankPart& part = p.part[i];
    int active[kLowRankRows];
    const int n = active_rows(p, part, b.row, b.rows, active);
    for (int j = 0; j < n; ++j) {
      const int64_t row = b.row + active[j];
      const float scale = p.mask[row * p.owners + part.owner];
      const float* inner = p.inner + row * p.ranks + part.first_rank;
      float sum[kLowRankColumns] = {};
      for (int64_t r = 0; r < part.rank; ++r) {
        const float* weight = part.b + r * part.n + b.column;
        const float factor = scale * inner[r];
        for (int64_t c = 0; c < b.count; ++c) sum[c] += factor * weight[c];
      }
      float* y = p.y + row * p.y_stride + part.start + b.column;
      for (int64_t c = 0; c < b.count; ++c) y[c] += sum[c];
    }
  }
}

}  // namespace exl3::generic
