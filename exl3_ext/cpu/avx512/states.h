// Trellis states from lane planes (exl3/trellis.h), 32 an instruction.
//
// Lane t of a tile owns stream bits 8*K*t .. 8*K*(t+1); planes hold 16 of them for all lanes. The
// state of position 8t + e ends K*(e+1) bits into the lane: one plane as it is, or a funnel shift
// of two. What lies before the lane's first bit is the state of e = 7 of the lane before.
#pragma once
#include <immintrin.h>

#include <cstdint>

// Own copy in every file, always inlined: files of several levels include this.
#ifndef EXL3_STATIC
#define EXL3_STATIC static inline __attribute__((always_inline))
#endif

namespace exl3::avx512 {

// v[t] -> v[t - 1], circular over 32 lanes of 16 bits.
EXL3_STATIC __m512i previous_lane(__m512i v) {
  const __m512i index = _mm512_set_epi16(30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16,
                                         15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 31);
  return _mm512_permutexvar_epi16(index, v);
}

// The last 8 bits of each lane at odd K, in the high byte of 16; the low byte is zero.
template <int K>
EXL3_STATIC __m512i tail_plane(const uint16_t* tile) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + 32 * (K / 2)));
  return _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8);
}

// 16-bit word W of a lane: plane W, or the tail; W = -1: the last 16 bits of the lane before.
template <int K>
struct Planes {
  __m512i before;
  __m512i word[K / 2 + 1];
};

template <int W, int K>
EXL3_STATIC __m512i plane_word(const Planes<K>& p) {
  if constexpr (W < 0)
    return p.before;
  else
    return p.word[W];
}

// State of positions 8t + E in lane t.
template <int E, int K>
EXL3_STATIC __m512i state(const Planes<K>& p) {
  constexpr int kStart = K * (E + 1) - 16;
  constexpr int kWord = kStart < 0 ? -1 : kStart / 16;
  constexpr int kShift = kStart - 16 * kWord;
  if constexpr (kShift == 0)
    return plane_word<kWord>(p);
  else
    return _mm512_shldi_epi16(plane_word<kWord>(p), plane_word<kWord + 1>(p), kShift);
}

template <int K>
EXL3_STATIC Planes<K> load_planes(const uint16_t* tile) {
  Planes<K> p;
  for (int w = 0; w < K / 2; ++w) p.word[w] = _mm512_loadu_si512(tile + 32 * w);
  if constexpr (K % 2 == 0) {
    p.before = previous_lane(p.word[K / 2 - 1]);
  } else if constexpr (K == 1) {
    p.word[0] = tail_plane<K>(tile);
    const __m512i last = _mm512_or_si512(previous_lane(p.word[0]), _mm512_srli_epi16(p.word[0], 8));
    p.before = previous_lane(last);
  } else {
    p.word[K / 2] = tail_plane<K>(tile);
    p.before = previous_lane(_mm512_shldi_epi16(p.word[K / 2 - 1], p.word[K / 2], 8));
  }
  return p;
}

// Asks for the cache lines 2 KB on: about 16 tiles at 4 bits. The hardware's own prefetch stops at
// pages and is slow to start: without this, streams from the last-level cache run at 25 to 90 % of
// the speed of weights in the second-level cache (4 and 2 bits, Xeon with AMX), with it at 100 %.
template <int K>
EXL3_STATIC void prefetch_ahead(const uint16_t* tile) {
#pragma GCC unroll 4
  for (int line = 0; line < 32 * K; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(tile) + 2048 + line, _MM_HINT_T0);
  }
}

// The 256 states of a tile: lane t of states[e] is that of position 8t + e.
template <int K>
EXL3_STATIC void tile_states(const uint16_t* tile, __m512i* states) {
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

}  // namespace exl3::avx512
