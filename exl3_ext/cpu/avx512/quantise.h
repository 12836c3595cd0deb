// Rounding one 128-block of activations, eight registers, to integers.
#pragma once
#include "cpu/avx512/vec.h"
#include "cpu/linear_plan.h"

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

// 16 words in the order of LinearWeightPlan::q -> the low bytes, each twice.
static inline __m256i low_bytes_twice(__m256i words) {
  words = _mm256_and_si256(words, _mm256_set1_epi16(255));
  return _mm256_or_si256(words, _mm256_slli_epi16(words, 8));
}

// One row of an AMX tile: the four inputs of e = 0, twice over, then those of e = 1, 2, 3.
static inline void store_tile_row(int16_t* to, __m256i words) {
  const __m512i order = _mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0);
  const __m512i bytes = _mm512_castsi256_si512(low_bytes_twice(words));
  _mm512_storeu_si512(to, _mm512_permutexvar_epi64(order, bytes));
}

// The 16 inputs of tile `r` of the block as bytes: a quarter of a row of a tile of 64 inputs.
static inline void store_quarter_row(const LinearTarget& to, int r, __m256i words) {
  constexpr int kPlane = 1024;
  uint8_t* at = reinterpret_cast<uint8_t*>(to.q) + r / 4 * to.planes * kPlane + r % 4 * 16;
  if (to.planes == 2) {  // first the high bytes: word = 256 * high + signed low
    const __m256i high = _mm256_add_epi16(words, _mm256_set1_epi16(128));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at),
                     _mm256_cvtepi16_epi8(_mm256_srli_epi16(high, 8)));
    at += kPlane;
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_cvtepi16_epi8(words));
}

// The 16 quantised inputs of tile `r` of the block.
static inline void store_words(const LinearTarget& to, int r, __m256i words) {
  if (to.kernel == LinearKernel::kMany) return store_quarter_row(to, r, words);
  if (to.kernel == LinearKernel::kTiles) {
    constexpr int kPlane = 16 * 32;  // int16 units: 16 rows of 64 bytes
    int16_t* at = to.q + r * to.planes * kPlane;
    if (to.planes == 2) {  // first the high bytes: word = 256 * high + signed low
      const __m256i high = _mm256_add_epi16(words, _mm256_set1_epi16(128));
      store_tile_row(at, _mm256_srli_epi16(high, 8));
      at += kPlane;
    }
    store_tile_row(at, words);
    return;
  }
  if (to.kernel == LinearKernel::kBytes) words = low_bytes_twice(words);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.q + 16 * r), words);
}

// q = round(v * scale), or all zeros. Returns the sum of q.
static inline int32_t quantise(const vec* v, float scale, bool keep, const LinearTarget& to) {
  const __m512i order = _mm512_set_epi32(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0);
  const __mmask16 kept = keep ? 0xFFFF : 0;
  __m512i sums = _mm512_setzero_si512();
  for (int r = 0; r < 8; ++r) {
    const __m512i values = _mm512_maskz_cvtps_epi32(kept, v[r] * vset(scale));
    sums = _mm512_add_epi32(sums, values);
    store_words(to, r, _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(order, values)));
  }
  return _mm512_reduce_add_epi32(sums);
}

}  // namespace exl3::avx512
