// Block-diagonal Hadamard transform, one 128-block in eight registers: 32 shuffles and 56 additions
// a block. Bound by memory for rows beyond the second-level cache.
#include "cpu/avx512/hadamard.h"

#include "cpu/avx512/hadamard_inl.h"

namespace exl3::avx512 {

void hadamard_rows(const HadamardParams& p, int64_t begin, int64_t end) {
  const __m512 norm = _mm512_set1_ps(kHadamardNorm);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t block = 0; block < p.dim; block += kHadamardDim) {
      const int64_t at = row * p.dim + block;
      __m512 v[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) {
        v[r] = load16(p.x, p.dtype, at + 16 * r);
        if (p.pre_scale) v[r] = _mm512_mul_ps(v[r], load16_half(p.pre_scale + block + 16 * r));
      }
      hadamard128(v);
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) {
        __m512 s = norm;
        if (p.post_scale) s = _mm512_mul_ps(norm, load16_half(p.post_scale + block + 16 * r));
        store16(p.y, p.dtype, at + 16 * r, _mm512_mul_ps(v[r], s));
      }
    }
  }
}

}  // namespace exl3::avx512
