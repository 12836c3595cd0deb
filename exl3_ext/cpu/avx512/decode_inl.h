// Codebook values of 32 states at a time.
#pragma once
#include "cpu/avx512/states.h"
#include "exl3/codebook.h"

namespace exl3::avx512 {

// Which of the 32 states is lane i of the two registers that `weights32` returns:
//   3inst, mcg   first: state i                second: state 16 + i
//   mul1         first: state i + i/4*4        second: the same + 4   (what unpacking words gives)
template <Codebook C>
EXL3_STATIC constexpr int state_of_lane(int i) {
  if (C != Codebook::kMul1) return i;
  return i < 16 ? i + i / 4 * 4 : state_of_lane<C>(i - 16) + 4;
}

struct Product {
  __m512i lo, hi;  // words of state * C
};

template <uint32_t C>
EXL3_STATIC Product multiply(__m512i s) {
  const __m512i c_lo = _mm512_set1_epi16(static_cast<short>(C & 0xFFFF));
  const __m512i c_hi = _mm512_set1_epi16(static_cast<short>(C >> 16));
  return {_mm512_mullo_epi16(s, c_lo),
          _mm512_add_epi16(_mm512_mulhi_epu16(s, c_lo), _mm512_mullo_epi16(s, c_hi))};
}

// Both float16 values of a 3inst or mcg state, in one register each.
template <Codebook C>
EXL3_STATIC Product half_pairs(__m512i s) {
  Product x;
  if constexpr (C == Codebook::k3inst) {
    x = multiply<k3instMul>(s);
    x.lo = _mm512_add_epi16(x.lo, _mm512_set1_epi16(static_cast<short>(k3instAdd & 0xFFFF)));
    const __mmask32 carry =
        _mm512_cmplt_epu16_mask(x.lo, _mm512_set1_epi16(static_cast<short>(k3instAdd & 0xFFFF)));
    x.hi = _mm512_add_epi16(x.hi, _mm512_set1_epi16(static_cast<short>(k3instAdd >> 16)));
    x.hi = _mm512_mask_add_epi16(x.hi, carry, x.hi, _mm512_set1_epi16(1));
  } else {
    x = multiply<kMcgMul>(s);
  }
  static_assert((kHalfPairMask >> 16) == (kHalfPairMask & 0xFFFF));
  static_assert((kHalfPairXor >> 16) == (kHalfPairXor & 0xFFFF));
  const __m512i mask = _mm512_set1_epi16(static_cast<short>(kHalfPairMask & 0xFFFF));
  const __m512i flip = _mm512_set1_epi16(static_cast<short>(kHalfPairXor & 0xFFFF));
  constexpr int kXorAnd = 0x78;  // a ^ (b & c)
  return {_mm512_ternarylogic_epi32(flip, x.lo, mask, kXorAnd),
          _mm512_ternarylogic_epi32(flip, x.hi, mask, kXorAnd)};
}

// mul1: the sums of the four bytes, 0..1020, in 16-bit lanes.
EXL3_STATIC __m512i byte_sums(__m512i s) {
  const Product x = multiply<kMul1Mul>(s);
  const __m512i ones = _mm512_set1_epi8(1);
  return _mm512_add_epi16(_mm512_maddubs_epi16(x.lo, ones), _mm512_maddubs_epi16(x.hi, ones));
}

// Values of 32 states before their rounding to float16; exact (see generic/codebook.cpp). Lane
// order: `state_of_lane`.
template <Codebook C>
EXL3_STATIC void weights32(__m512i s, __m512* first, __m512* second) {
  if constexpr (C == Codebook::kMul1) {
    // A word under 0x4B00 is the float 2^23 + word; the offset takes 2^23 * a off again. The result
    // is a multiple of 2^-18 below 16, so one fused multiply-add gives it exactly.
    constexpr float kScale = 1774.0f / 262144.0f;                             // 0x1EEE
    constexpr float kOffset = -10.3828125f + (kMul1Bias - 8388608) * kScale;  // 0xC931, 22 bits
    static_assert(kMul1ScaleBits == 0x1EEE && kMul1OffsetBits == 0xC931);
    const __m512i sums = byte_sums(s);
    const __m512i top = _mm512_set1_epi16(0x4B00);
    const __m512 a = _mm512_set1_ps(kScale), c = _mm512_set1_ps(kOffset);
    *first = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_unpacklo_epi16(sums, top)), a, c);
    *second = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_unpackhi_epi16(sums, top)), a, c);
  } else {
    const Product pair = half_pairs<C>(s);
    *first = _mm512_add_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(pair.lo)),
                           _mm512_cvtph_ps(_mm512_castsi512_si256(pair.hi)));
    *second = _mm512_add_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(pair.lo, 1)),
                            _mm512_cvtph_ps(_mm512_extracti64x4_epi64(pair.hi, 1)));
  }
}

}  // namespace exl3::avx512
