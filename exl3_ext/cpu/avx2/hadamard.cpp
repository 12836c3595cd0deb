// Block-diagonal Hadamard transform, one 128-block in sixteen registers.
#include "cpu/avx2/hadamard.h"

#include "cpu/avx2/hadamard_inl.h"

namespace exl3::avx2 {

void hadamard_rows(const HadamardParams& p, int64_t begin, int64_t end) {
  const __m256 norm = _mm256_set1_ps(kHadamardNorm);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t block = 0; block < p.dim; block += kHadamardDim) {
      const int64_t at = row * p.dim + block;
      __m256 v[16];
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        v[r] = load8(p.x, p.dtype, at + 8 * r);
        if (p.pre_scale) v[r] = _mm256_mul_ps(v[r], load8_half(p.pre_scale + block + 8 * r));
      }
      hadamard128(v);
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        __m256 s = norm;
        if (p.post_scale) s = _mm256_mul_ps(norm, load8_half(p.post_scale + block + 8 * r));
        store8(p.y, p.dtype, at + 8 * r, _mm256_mul_ps(v[r], s));
      }
    }
  }
}

}  // namespace exl3::avx2
