#include "cpu/generic/rows.h"

namespace exl3::generic {

void argmax_rows(const ArgmaxParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* x = p.x + row * p.x_stride;
    int64_t best = 0;
    for (int64_t i = 1; i < p.valid; ++i) {
      const bool best_is_nan = x[best] != x[best];
      if (x[i] > x[best] || (best_is_nan && x[i] == x[i])) best = i;
    }
    p.index[row] = best;
  }
}

}  // namespace exl3::generic
