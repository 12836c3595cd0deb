// Weights as integers from states, 16 an instruction: `linear_scale` says what they mean.
#pragma once
#include "cpu/avx2/decode_inl.h"

namespace exl3::avx2 {

// A float16 of exponent field 12..15 times 2^13: the 11-bit significand times 1, 2, 4 or 8, which
// a byte shuffle looks up (an index with its top bit set gives 0: the high bytes).
EXL3_STATIC __m256i fixed_point(__m256i half) {
  const __m256i power = _mm256_set1_epi32(0x08040201);
  const __m256i significand =
      _mm256_or_si256(_mm256_and_si256(half, _mm256_set1_epi16(0x3FF)), _mm256_set1_epi16(0x400));
  const __m256i exponent = _mm256_and_si256(_mm256_srli_epi16(half, 10), _mm256_set1_epi16(3));
  const __m256i index = _mm256_or_si256(exponent, _mm256_set1_epi16(static_cast<short>(0x8000)));
  const __m256i magnitude = _mm256_mullo_epi16(significand, _mm256_shuffle_epi8(power, index));
  return _mm256_sign_epi16(magnitude, half);
}

template <Codebook C>
EXL3_STATIC __m256i weight_values(__m256i state) {
  if constexpr (C == Codebook::kMul1) {
    return byte_sums(state);
  } else {
    const Product pair = half_pairs<C>(state);
    return _mm256_add_epi16(fixed_point(pair.lo), fixed_point(pair.hi));
  }
}

}  // namespace exl3::avx2
