// Weights as integers from states, 32 an instruction: `linear_scale` says what they mean.
#pragma once
#include "cpu/avx512/states.h"
#include "exl3/codebook.h"

namespace exl3::avx512 {

// state * kMul modulo 2^32 as two registers of halves: three multiplies of 16 bits and an addition.
template <uint32_t kMul>
EXL3_STATIC void product(__m512i state, __m512i* lo, __m512i* hi) {
  const __m512i c_lo = _mm512_set1_epi16(static_cast<int16_t>(kMul & 0xFFFF));
  const __m512i c_hi = _mm512_set1_epi16(static_cast<int16_t>(kMul >> 16));
  *lo = _mm512_mullo_epi16(state, c_lo);
  *hi = _mm512_add_epi16(_mm512_mulhi_epu16(state, c_lo), _mm512_mullo_epi16(state, c_hi));
}

// One half of a float16 pair as product bits -> the number times 2^13: the 11-bit significand
// shifted by the exponent field less 12, which the mask and xor bring to 0..3.
EXL3_STATIC __m512i fixed_point(__m512i product) {
  const __m512i mask = _mm512_set1_epi16(static_cast<int16_t>(kHalfPairMask & 0xFFFF));
  const __m512i flip = _mm512_set1_epi16(static_cast<int16_t>(kHalfPairXor & 0xFFFF));
  const __m512i half = _mm512_ternarylogic_epi32(product, mask, flip, 0x6A);  // (a & b) ^ c
  const __m512i significand = _mm512_ternarylogic_epi32(
      half, _mm512_set1_epi16(0x3FF), _mm512_set1_epi16(0x400), 0xEA);  // (a & b) | c
  const __m512i shift = _mm512_and_si512(_mm512_srli_epi16(half, 10), _mm512_set1_epi16(3));
  const __m512i magnitude = _mm512_sllv_epi16(significand, shift);
  return _mm512_mask_sub_epi16(magnitude, _mm512_movepi16_mask(half), _mm512_setzero_si512(),
                               magnitude);
}

// Sum of the four bytes of each product.
EXL3_STATIC __m512i byte_sums(__m512i lo, __m512i hi) {
  const __m512i ones = _mm512_set1_epi8(1);
  return _mm512_add_epi16(_mm512_maddubs_epi16(lo, ones), _mm512_maddubs_epi16(hi, ones));
}

template <Codebook kCodebook>
EXL3_STATIC __m512i weight_values(__m512i state) {
  __m512i lo, hi;
  if constexpr (kCodebook == Codebook::kMul1) {
    product<kMul1Mul>(state, &lo, &hi);
    return byte_sums(lo, hi);
  } else if constexpr (kCodebook == Codebook::kMcg) {
    product<kMcgMul>(state, &lo, &hi);
  } else {
    product<k3instMul>(state, &lo, &hi);
    const __m512i add_lo = _mm512_set1_epi16(static_cast<int16_t>(k3instAdd & 0xFFFF));
    const __m512i add_hi = _mm512_set1_epi16(static_cast<int16_t>(k3instAdd >> 16));
    lo = _mm512_add_epi16(lo, add_lo);
    hi = _mm512_add_epi16(hi, add_hi);
    hi = _mm512_mask_add_epi16(hi, _mm512_cmplt_epu16_mask(lo, add_lo), hi, _mm512_set1_epi16(1));
  }
  return _mm512_add_epi16(fixed_point(lo), fixed_point(hi));
}

}  // namespace exl3::avx512
