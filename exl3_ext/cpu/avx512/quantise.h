// Rounding one 128-block of activations, eight registers, to integers.
#pragma once
#include "cpu/avx512/vec.h"

namespace exl3::avx512 {

// The largest magnitude; NaN above infinity above numbers.
static inline float peak_of(const vec* v) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i top = _mm512_setzero_si512();
  for (int r = 0; r < 8; ++r) {
    top = _mm512_max_epu32(top, _mm512_and_si512(_mm512_castps_si512(v[r]), magnitude));
  }
  const uint32_t bits = _mm512_reduce_max_epu32(top);
  float peak;
  __builtin_memcpy(&peak, &bits, 4);
  return peak;
}

// q = round(v * scale), or all zeros, in the order of LinearWeightPlan::q; `twice`: as an int8 in
// both bytes. sum: of the inputs with (input / 4) % 2 = 0, and of the others.
static inline void quantise(const vec* v, float scale, bool keep, bool twice, int16_t* q,
                            int32_t* sum) {
  const __m512i order = _mm512_set_epi32(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0);
  const __mmask16 kept = keep ? 0xFFFF : 0;
  __m512i sums = _mm512_setzero_si512();
  for (int r = 0; r < 8; ++r) {
    const __m512i values = _mm512_maskz_cvtps_epi32(kept, v[r] * vset(scale));
    sums = _mm512_add_epi32(sums, values);
    __m256i words = _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(order, values));
    if (twice) {
      words = _mm256_and_si256(words, _mm256_set1_epi16(255));
      words = _mm256_or_si256(words, _mm256_slli_epi16(words, 8));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + 16 * r), words);
  }
  sum[0] = _mm512_mask_reduce_add_epi32(0x0F0F, sums);
  sum[1] = _mm512_mask_reduce_add_epi32(0xF0F0, sums);
}

}  // namespace exl3::avx512
