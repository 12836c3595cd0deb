// One coarse step of the trellis search (cpu/encode_step.h) in AVX-512 with BW.
//
// A row of 32 nodes is one register per tile. Per 32 edges of a tile: one broadcast load, the
// difference, its square rounded, the bound of that, a sum and a minimum; the load of
// the table row is shared by the tiles. Bound by the two ports that run 512-bit arithmetic.
#include <immintrin.h>

#include "cpu/avx512/encode.h"

namespace exl3::avx512 {
namespace {

// The predecessors of a row for one h, repeated over the lanes.
template <int K>
static inline __m512i load_old(const int16_t* p) {
  if constexpr (K == 1) return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
  if constexpr (K == 2) return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
  return _mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i*)p));
}

// Differences that saturate are far beyond the bound. vpmulhrsw rounds halves up; of the negative
// square of a wide edge, so that those of the square go down.
template <bool kWide>
static inline __m512i edge(__m512i x, __m512i y) {
  const __m512i most = _mm512_set1_epi16(kEncodeCoarseMost);
  const __m512i up = _mm512_subs_epi16(x, y);
  if (!kWide) return _mm512_min_epi16(_mm512_mulhrs_epi16(up, up), most);
  const __m512i down = _mm512_subs_epi16(y, x), zero = _mm512_sub_epi16(x, x);
  const __m512i steps = _mm512_mulhrs_epi16(_mm512_srai_epi16(up, 1), _mm512_srai_epi16(down, 1));
  return _mm512_slli_epi16(_mm512_min_epi16(_mm512_sub_epi16(zero, steps), most), 2);
}

// Where the lanes of a row (table order) go to be in node order.
template <int K>
static inline __m512i node_order() {
  alignas(64) int16_t from[32];
  for (int i = 0; i < 32; ++i) from[i] = i % (1 << K) * (32 >> K) + (i >> K);
  return _mm512_load_si512(from);
}

template <int K, bool kWide, int B>
static void step(const int16_t* table, EncodeCoarseStep::Tile* const* tiles) {
  constexpr int kNodes = kStates >> K, kFan = 1 << K, kOld = kNodes >> K, kPeriod = 32 >> K;
  const __m512i order = node_order<K>();
  __m512i y[B], reference[B];
  for (int b = 0; b < B; ++b) {
    y[b] = _mm512_set1_epi16(tiles[b]->y);
    reference[b] = _mm512_set1_epi16(tiles[b]->reference);
  }
  for (int row = 0; row < kNodes / 32; ++row) {
    __m512i best[B];
    for (int b = 0; b < B; ++b) best[b] = _mm512_set1_epi16(INT16_MAX);
#pragma GCC unroll 8
    for (int h = 0; h < kFan; ++h) {
      const __m512i x = _mm512_loadu_si512(table);
      table += 32;
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const __m512i old = load_old<K>(tiles[b]->before + h * kOld + row * kPeriod);
        best[b] = _mm512_min_epi16(best[b], _mm512_add_epi16(old, edge<kWide>(x, y[b])));
      }
    }
    for (int b = 0; b < B; ++b) {
      const __m512i cost = _mm512_sub_epi16(best[b], reference[b]);
      _mm512_storeu_si512(tiles[b]->after + row * 32, _mm512_permutexvar_epi16(order, cost));
    }
  }
}

// The tiles whose edges are wide, or those whose are not.
template <int K, bool kWide>
static void step_some(EncodeCoarseStep& s) {
  EncodeCoarseStep::Tile* some[kEncodeBatch];
  int count = 0;
  for (int i = 0; i < s.count; ++i)
    if (s.tile[i].wide == kWide) some[count++] = &s.tile[i];
  if (count == 4) step<K, kWide, 4>(s.table, some);
  if (count == 3) step<K, kWide, 3>(s.table, some);
  if (count == 2) step<K, kWide, 2>(s.table, some);
  if (count == 1) step<K, kWide, 1>(s.table, some);
}

}  // namespace

void encode_coarse_step(EncodeCoarseStep& s) {
  if (s.bits == 1) return step_some<1, false>(s);
  if (s.bits == 2) return step_some<2, false>(s);
  step_some<3, false>(s);
  step_some<3, true>(s);
}

}  // namespace exl3::avx512
