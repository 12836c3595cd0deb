#include "cpu/generic/half.h"
#include "cpu/generic/rows.h"

namespace exl3::generic {

void embedding_rows(const EmbeddingParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = p.ids[row] * p.dim;
    float* y = p.y + row * p.dim;
    for (int64_t i = 0; i < p.dim; ++i) y[i] = load_float(p.table, p.dtype, at + i) * p.scale;
  }
}

}  // namespace exl3::generic
