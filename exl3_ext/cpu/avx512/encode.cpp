// One step of the trellis search (cpu/encode_step.h) in AVX-512 with VNNI.
//
// A row of 16 nodes is one register per tile. Per 16 edges of a tile: one broadcast load, a
// vpdpwssd and a vpminsd (4 bits), or a subtraction more (the others); the load of the table
// row is shared by the tiles. Bound by the two ports that run 512-bit arithmetic.
#include "cpu/avx512/encode.h"

#include <immintrin.h>

namespace exl3::avx512 {
namespace {

template <int K>
static inline __m512i relax(__m512i best, __m512i old, __m512i x, __m512i y) {
  if constexpr (K > kEncodeTaggedBits) {
    x = _mm512_sub_epi16(x, y);
    y = x;
  }
  return _mm512_min_epi32(best, _mm512_dpwssd_epi32(old, x, y));
}

template <int K, int B>
static void step(EncodeStep& s) {
  constexpr int kNodes = kStates >> K, kFan = 1 << K, kOld = kNodes >> K;
  constexpr bool kTagged = K == kEncodeTaggedBits;
  const __m512i cap = _mm512_set1_epi32(kEncodeCap);
  const __m512i keep = _mm512_set1_epi32(encode_keep(K));
  __m512i y[B], shift[B], low[B];
  for (int b = 0; b < B; ++b) {
    const EncodeStep::Tile& t = s.tile[b];
    y[b] = _mm512_set1_epi32((uint16_t)t.y[0] | (uint32_t)(uint16_t)t.y[1] << 16);
    shift[b] = _mm512_set1_epi32(encode_shift(K, t.low));
    low[b] = cap;
  }
  const int16_t* table = s.table;
  for (int row = 0; row < kNodes / 16; ++row) {
    const int first = row >> (K - 4);
    __m512i best[B];
    for (int b = 0; b < B; ++b) best[b] = _mm512_add_epi32(cap, shift[b]);
#pragma GCC unroll 16
    for (int h = 0; h < kFan; ++h) {
      const __m512i x = _mm512_loadu_si512(table);
      table += 32;
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b)
        best[b] = relax<K>(best[b], _mm512_set1_epi32(s.tile[b].before[h * kOld + first]), x, y[b]);
    }
    for (int b = 0; b < B; ++b) {
      const EncodeStep::Tile& t = s.tile[b];
      __m512i cost = _mm512_sub_epi32(best[b], shift[b]);
      if constexpr (kTagged) {
        for (int i = 0; i < K; ++i)
          t.choice[row * K + i] = _mm512_test_epi32_mask(best[b], _mm512_set1_epi32(1 << i));
        const __m512i tag = _mm512_set1_epi32(row >> (12 - 2 * K));
        cost = _mm512_ternarylogic_epi32(cost, keep, tag, 0xEA);  // (cost & keep) | tag
      }
      low[b] = _mm512_min_epi32(low[b], cost);
      _mm512_storeu_si512(t.after + row * 16, cost);
    }
  }
  for (int b = 0; b < B; ++b) s.tile[b].low = _mm512_reduce_min_epi32(low[b]);
}

template <int K>
static void step_of(EncodeStep& s) {
  if (s.count == 4) return step<K, 4>(s);
  if (s.count == 3) return step<K, 3>(s);
  if (s.count == 2) return step<K, 2>(s);
  step<K, 1>(s);
}

}  // namespace

void encode_step(EncodeStep& s) {
  using Fn = void (*)(EncodeStep&);
  static constexpr Fn kByBits[] = {step_of<4>, step_of<5>, step_of<6>, step_of<7>, step_of<8>};
  kByBits[s.bits - 4](s);
}

}  // namespace exl3::avx512
