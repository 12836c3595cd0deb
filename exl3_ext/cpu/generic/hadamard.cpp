// Block-diagonal Hadamard transform, one 128-block at a time in float32.
#include "cpu/generic/hadamard.h"

#include "cpu/generic/half.h"

namespace exl3::generic {

void hadamard_rows(const HadamardParams& p, int64_t begin, int64_t end) {
  constexpr float kNorm = 0.08838834764831845f;  // 1 / sqrt(128)
  float v[kHadamardDim];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t block = 0; block < p.dim; block += kHadamardDim) {
      const int64_t at = row * p.dim + block;
      for (int i = 0; i < kHadamardDim; ++i) {
        v[i] = load_float(p.x, p.dtype, at + i);
        if (p.pre_scale) v[i] *= half_to_float(p.pre_scale[block + i]);
      }
      for (int h = 1; h < kHadamardDim; h *= 2) {
        for (int i = 0; i < kHadamardDim; i += 2 * h) {
          for (int j = i; j < i + h; ++j) {
            const float a = v[j], b = v[j + h];
            v[j] = a + b;
            v[j + h] = a - b;
          }
        }
      }
      for (int i = 0; i < kHadamardDim; ++i) {
        const float s = p.post_scale ? kNorm * half_to_float(p.post_scale[block + i]) : kNorm;
        store_float(p.y, p.dtype, at + i, v[i] * s);
      }
    }
  }
}

}  // namespace exl3::generic
