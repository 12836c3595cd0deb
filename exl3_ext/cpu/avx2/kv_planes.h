// Codes of a block of a quantised cache, 8 lanes. Format: exl3/kv_quant.h.
#pragma once
#include "cpu/avx2/vec.h"
#include "exl3/kv_quant.h"

namespace exl3::avx2 {

template <int kWidth>
static inline __m256i load_plane(const uint32_t* words) {
  if constexpr (kWidth == 8) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
  if constexpr (kWidth == 4) {
    return _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
  }
  if constexpr (kWidth == 2) {
    return _mm256_castsi128_si256(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(words)));
  }
  return _mm256_set1_epi32(static_cast<int>(words[0]));
}

// Adds the bits of one plane, from bit kLow of the codes on: lane i of codes[g] and codes[2 + g] is
// code 8g + i and 16 + 8g + i.
template <int kWidth, int kLow>
static inline void add_plane(const uint32_t* words, __m256i* codes) {
  constexpr int kEach = 16 / kWidth;
  const __m256i all = load_plane<kWidth>(words);
  const __m256i mask = _mm256_set1_epi32((1 << kWidth) - 1);
  for (int g = 0; g < 2; ++g) {
    const __m256i p =
        _mm256_add_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32(8 * g));
    const __m256i own = _mm256_srli_epi32(p, __builtin_ctz(kEach));
    const __m256i place = _mm256_and_si256(p, _mm256_set1_epi32(kEach - 1));
    const __m256i shift = _mm256_slli_epi32(place, __builtin_ctz(kWidth));
    __m256i w = _mm256_srlv_epi32(_mm256_permutevar8x32_epi32(all, own), shift);
    codes[g] = _mm256_or_si256(codes[g], _mm256_slli_epi32(_mm256_and_si256(w, mask), kLow));
    w = _mm256_and_si256(_mm256_srli_epi32(w, 16), mask);
    codes[2 + g] = _mm256_or_si256(codes[2 + g], _mm256_slli_epi32(w, kLow));
  }
}

// The 32 codes of a block as whole floats, in order.
template <int kBits>
static inline void block_codes(const uint32_t* words, vec* to) {
  __m256i codes[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                      _mm256_setzero_si256()};
  if constexpr ((kBits & 8) != 0) add_plane<8, 0>(words, codes);
  if constexpr ((kBits & 4) != 0) add_plane<4, 0>(words, codes);
  if constexpr ((kBits & 2) != 0) add_plane<2, (kBits & 4)>(words + (kBits & 4), codes);
  if constexpr ((kBits & 1) != 0) add_plane<1, (kBits & 6)>(words + (kBits & 6), codes);
  for (int i = 0; i < 4; ++i) to[i] = _mm256_cvtepi32_ps(codes[i]);
}

}  // namespace exl3::avx2
