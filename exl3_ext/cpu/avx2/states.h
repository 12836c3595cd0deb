// Trellis states from lane planes (exl3/trellis.h), 16 an instruction. See avx512/states.h for how
// they are cut out; here a funnel shift is two shifts and an or.
#pragma once
#include <immintrin.h>

#include <cstdint>

// Own copy in every file, always inlined: files of several levels include this.
#ifndef EXL3_STATIC
#define EXL3_STATIC static inline __attribute__((always_inline))
#endif

namespace exl3::avx2 {

// 32 lanes of 16 bits: lanes 0..15 and 16..31.
struct Lanes {
  __m256i lo, hi;
};

template <int S>
EXL3_STATIC __m256i funnel(__m256i a, __m256i b) {
  return _mm256_or_si256(_mm256_slli_epi16(a, S), _mm256_srli_epi16(b, 16 - S));
}
template <int S>
EXL3_STATIC Lanes funnel(const Lanes& a, const Lanes& b) {
  return {funnel<S>(a.lo, b.lo), funnel<S>(a.hi, b.hi)};
}

// v[t] -> v[t - 1], circular over the 32 lanes.
EXL3_STATIC Lanes previous_lane(const Lanes& v) {
  const __m256i into_lo = _mm256_permute2x128_si256(v.hi, v.lo, 0x21);  // hi's high half, lo's low
  const __m256i into_hi = _mm256_permute2x128_si256(v.lo, v.hi, 0x21);
  return {_mm256_alignr_epi8(v.lo, into_lo, 14), _mm256_alignr_epi8(v.hi, into_hi, 14)};
}

template <int K>
EXL3_STATIC Lanes tail_plane(const uint16_t* tile) {
  const __m128i* bytes = reinterpret_cast<const __m128i*>(tile + 32 * (K / 2));
  return {_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(bytes)), 8),
          _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(bytes + 1)), 8)};
}

template <int K>
struct Planes {
  Lanes before;
  Lanes word[K / 2 + 1];
};

template <int W, int K>
EXL3_STATIC Lanes plane_word(const Planes<K>& p) {
  if constexpr (W < 0)
    return p.before;
  else
    return p.word[W];
}

// State of positions 8t + E in lane t.
template <int E, int K>
EXL3_STATIC Lanes state(const Planes<K>& p) {
  constexpr int kStart = K * (E + 1) - 16;
  constexpr int kWord = kStart < 0 ? -1 : kStart / 16;
  constexpr int kShift = kStart - 16 * kWord;
  if constexpr (kShift == 0)
    return plane_word<kWord>(p);
  else
    return funnel<kShift>(plane_word<kWord>(p), plane_word<kWord + 1>(p));
}

template <int K>
EXL3_STATIC Planes<K> load_planes(const uint16_t* tile) {
  Planes<K> p;
  for (int w = 0; w < K / 2; ++w) {
    p.word[w].lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + 32 * w));
    p.word[w].hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + 32 * w + 16));
  }
  if constexpr (K % 2 == 0) {
    p.before = previous_lane(p.word[K / 2 - 1]);
  } else if constexpr (K == 1) {
    p.word[0] = tail_plane<K>(tile);
    const Lanes back = previous_lane(p.word[0]);
    const Lanes last = {
        _mm256_or_si256(back.lo, _mm256_srli_epi16(p.word[0].lo, 8)),
        _mm256_or_si256(back.hi, _mm256_srli_epi16(p.word[0].hi, 8)),
    };
    p.before = previous_lane(last);
  } else {
    p.word[K / 2] = tail_plane<K>(tile);
    p.before = previous_lane(funnel<8>(p.word[K / 2 - 1], p.word[K / 2]));
  }
  return p;
}

// The 256 states of a tile: lane t of states[e] is that of position 8t + e.
template <int K>
EXL3_STATIC void tile_states(const uint16_t* tile, Lanes* states) {
  const Planes<K> p = load_planes<K>(tile);
  states[0] = state<0>(p);
  states[1] = state<1>(p);
  states[2] = state<2>(p);
  states[3] = state<3>(p);
  states[4] = state<4>(p);
  states[5] = state<5>(p);
  states[6] = state<6>(p);
  states[7] = state<7>(p);
}

}  // namespace exl3::avx2
