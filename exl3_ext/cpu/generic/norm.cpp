#include <cmath>

#include "cpu/generic/rows.h"

namespace exl3::generic {

void rms_norm_rows(const RmsNormParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* x = p.x + row * p.x_stride;
    float* y = p.y + row * p.dim;
    double sum = 0;
    for (int64_t i = 0; i < p.dim; ++i) sum += static_cast<double>(x[i]) * x[i];
    const float scale = static_cast<float>(1.0 / std::sqrt(sum / p.dim + p.eps));
    for (int64_t i = 0; i < p.dim; ++i) {
      y[i] = p.weight ? x[i] * scale * (p.weight[i] + p.weight_offset) : x[i] * scale;
    }
  }
}

}  // namespace exl3::generic
