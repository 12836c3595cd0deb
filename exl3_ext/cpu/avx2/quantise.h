// Rounding one 128-block of activations, sixteen registers, to integers.
#pragma once
#include "cpu/avx2/vec.h"
#include "cpu/linear_plan.h"

namespace exl3::avx2 {

// The largest magnitude; NaN above infinity above numbers.
static inline float peak_of(const vec* v) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i top = _mm256_setzero_si256();
  for (int r = 0; r < 16; ++r) {
    top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(v[r]), magnitude));
  }
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4E));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xB1));
  return _mm_cvtss_f32(_mm_castsi128_ps(half));
}

static inline int sum_of(__m128i v) {
  v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4E));
  v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0xB1));
  return _mm_cvtsi128_si32(v);
}

// q = round(v * scale), or all zeros, as int16 in the order of LinearWeightPlan::q (this level has
// no other kernels). Returns the sum of q.
static inline int32_t quantise(const vec* v, float scale, bool keep, const LinearTarget& to) {
  const __m256i kept = _mm256_set1_epi32(keep ? -1 : 0);
  // Of 8 inputs: the even ones, then the odd ones.
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  __m256i sums = _mm256_setzero_si256();
  for (int r = 0; r < 16; ++r) {
    const __m256i values = _mm256_and_si256(kept, _mm256_cvtps_epi32(v[r] * vset(scale)));
    sums = _mm256_add_epi32(sums, values);
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to.q + 8 * r), _mm_shuffle_epi8(words, order));
  }
  return sum_of(_mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)));
}

}  // namespace exl3::avx2
