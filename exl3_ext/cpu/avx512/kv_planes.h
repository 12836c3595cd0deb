// Codes of a block of a quantised cache, 16 lanes. Format: exl3/kv_quant.h.
#pragma once
#include "cpu/avx512/vec.h"
#include "exl3/kv_quant.h"

namespace exl3::avx512 {

// Adds the bits of one plane, from bit kLow of the codes on: lane p of low and high is code p and
// 16 + p.
template <int kWidth, int kLow>
static inline void add_plane(const uint32_t* words, __m512i& low, __m512i& high) {
  constexpr int kEach = 16 / kWidth;
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i own = _mm512_srli_epi32(lane, __builtin_ctz(kEach));
  const __m512i place = _mm512_and_si512(lane, _mm512_set1_epi32(kEach - 1));
  // Turns word p so that its part lies from bit kLow on; the part of 16 + p is 16 bits further.
  const __m512i turn = _mm512_slli_epi32(place, __builtin_ctz(kWidth));
  const __mmask16 present = static_cast<__mmask16>((1u << kWidth) - 1);
  __m512i w = _mm512_permutexvar_epi32(own, _mm512_maskz_loadu_epi32(present, words));
  w = _mm512_rorv_epi32(w, _mm512_sub_epi32(turn, _mm512_set1_epi32(kLow)));
  const __m512i mask = _mm512_set1_epi32(((1 << kWidth) - 1) << kLow);
  constexpr int kOrAnd = 0xF8;  // first | (second & third)
  low = _mm512_ternarylogic_epi32(low, w, mask, kOrAnd);
  high = _mm512_ternarylogic_epi32(high, _mm512_ror_epi32(w, 16), mask, kOrAnd);
}

// The 32 codes of a block as whole floats, in order.
template <int kBits>
static inline void block_codes(const uint32_t* words, vec* to) {
  __m512i low = _mm512_setzero_si512(), high = low;
  if constexpr ((kBits & 8) != 0) add_plane<8, 0>(words, low, high);
  if constexpr ((kBits & 4) != 0) add_plane<4, 0>(words, low, high);
  if constexpr ((kBits & 2) != 0) add_plane<2, (kBits & 4)>(words + (kBits & 4), low, high);
  if constexpr ((kBits & 1) != 0) add_plane<1, (kBits & 6)>(words + (kBits & 6), low, high);
  to[0] = _mm512_cvtepi32_ps(low);
  to[1] = _mm512_cvtepi32_ps(high);
}

}  // namespace exl3::avx512
