// Codebook values of 16 states at a time.
#pragma once
#include "cpu/avx2/states.h"
#include "exl3/codebook.h"

namespace exl3::avx2 {

// Which of the 16 states is lane i of the two registers that `weights16` returns:
//   3inst, mcg   first: state i                second: state 8 + i
//   mul1         first: state i + i/4*4        second: the same + 4   (what unpacking words gives)
template <Codebook C>
EXL3_STATIC constexpr int state_of_lane(int i) {
  if (C != Codebook::kMul1) return i;
  return i < 8 ? i + i / 4 * 4 : state_of_lane<C>(i - 8) + 4;
}

struct Product {
  __m256i lo, hi;  // words of state * C
};

template <uint32_t C>
EXL3_STATIC Product multiply(__m256i s) {
  const __m256i c_lo = _mm256_set1_epi16(static_cast<short>(C & 0xFFFF));
  const __m256i c_hi = _mm256_set1_epi16(static_cast<short>(C >> 16));
  return {_mm256_mullo_epi16(s, c_lo),
          _mm256_add_epi16(_mm256_mulhi_epu16(s, c_lo), _mm256_mullo_epi16(s, c_hi))};
}

// Both float16 values of a 3inst or mcg state, in one register each.
template <Codebook C>
EXL3_STATIC Product half_pairs(__m256i s) {
  Product x;
  if constexpr (C == Codebook::k3inst) {
    x = multiply<k3instMul>(s);
    const __m256i low = _mm256_set1_epi16(static_cast<short>(k3instAdd & 0xFFFF));
    x.lo = _mm256_add_epi16(x.lo, low);
    const __m256i no_carry = _mm256_cmpeq_epi16(_mm256_max_epu16(x.lo, low), x.lo);  // -1 or 0
    const __m256i high = _mm256_set1_epi16(static_cast<short>((k3instAdd >> 16) + 1));
    x.hi = _mm256_add_epi16(_mm256_add_epi16(x.hi, high), no_carry);
  } else {
    x = multiply<kMcgMul>(s);
  }
  static_assert((kHalfPairMask >> 16) == (kHalfPairMask & 0xFFFF));
  static_assert((kHalfPairXor >> 16) == (kHalfPairXor & 0xFFFF));
  const __m256i mask = _mm256_set1_epi16(static_cast<short>(kHalfPairMask & 0xFFFF));
  const __m256i flip = _mm256_set1_epi16(static_cast<short>(kHalfPairXor & 0xFFFF));
  return {_mm256_xor_si256(_mm256_and_si256(x.lo, mask), flip),
          _mm256_xor_si256(_mm256_and_si256(x.hi, mask), flip)};
}

// mul1: the sums of the four bytes, 0..1020, in 16-bit lanes.
EXL3_STATIC __m256i byte_sums(__m256i s) {
  const Product x = multiply<kMul1Mul>(s);
  const __m256i ones = _mm256_set1_epi8(1);
  return _mm256_add_epi16(_mm256_maddubs_epi16(x.lo, ones), _mm256_maddubs_epi16(x.hi, ones));
}

// Values of 16 states before their rounding to float16; exact (see generic/codebook.cpp). Lane
// order: `state_of_lane`.
template <Codebook C>
EXL3_STATIC void weights16(__m256i s, __m256* first, __m256* second) {
  if constexpr (C == Codebook::kMul1) {
    // A word under 0x4B00 is the float 2^23 + word; the offset takes 2^23 * a off again. The result
    // is a multiple of 2^-18 below 16, so one fused multiply-add gives it exactly.
    constexpr float kScale = 1774.0f / 262144.0f;                             // 0x1EEE
    constexpr float kOffset = -10.3828125f + (kMul1Bias - 8388608) * kScale;  // 0xC931, 22 bits
    static_assert(kMul1ScaleBits == 0x1EEE && kMul1OffsetBits == 0xC931);
    const __m256i sums = byte_sums(s);
    const __m256i top = _mm256_set1_epi16(0x4B00);
    const __m256 a = _mm256_set1_ps(kScale), c = _mm256_set1_ps(kOffset);
    *first = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_unpacklo_epi16(sums, top)), a, c);
    *second = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_unpackhi_epi16(sums, top)), a, c);
  } else {
    const Product pair = half_pairs<C>(s);
    *first = _mm256_add_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(pair.lo)),
                           _mm256_cvtph_ps(_mm256_castsi256_si128(pair.hi)));
    *second = _mm256_add_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(pair.lo, 1)),
                            _mm256_cvtph_ps(_mm256_extracti128_si256(pair.hi, 1)));
  }
}

}  // namespace exl3::avx2
