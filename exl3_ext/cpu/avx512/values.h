// Weights as integers from states, 32 an instruction: `linear_scale` says what they mean.
#pragma once
#include "cpu/avx512/decode_inl.h"

namespace exl3::avx512 {

// A float16 of exponent field 12..15 times 2^13: the 11-bit significand, shifted.
EXL3_STATIC __m512i fixed_point(__m512i half) {
  constexpr int kAndOr = 0xEA;  // (a & b) | c
  const __m512i significand =
      _mm512_ternarylogic_epi32(half, _mm512_set1_epi16(0x3FF), _mm512_set1_epi16(0x400), kAndOr);
  const __m512i shift = _mm512_and_si512(_mm512_srli_epi16(half, 10), _mm512_set1_epi16(3));
  const __m512i magnitude = _mm512_sllv_epi16(significand, shift);
  return _mm512_mask_sub_epi16(magnitude, _mm512_movepi16_mask(half), _mm512_setzero_si512(),
                               magnitude);
}

template <Codebook C>
EXL3_STATIC __m512i weight_values(__m512i state) {
  if constexpr (C == Codebook::kMul1) {
    return byte_sums(state);
  } else {
    const Product pair = half_pairs<C>(state);
    return _mm512_add_epi16(fixed_point(pair.lo), fixed_point(pair.hi));
  }
}

}  // namespace exl3::avx512
