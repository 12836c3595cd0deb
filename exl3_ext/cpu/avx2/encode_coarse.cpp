// One coarse step of the trellis search (cpu/encode_step.h) in AVX2.
//
// A row of 32 nodes is two registers per tile. Per 16 edges of a tile: both differences, the
// rounded product of the two, its bound, a subtraction and a minimum; one broadcast load serves
// both halves of a row, the load of the table row all tiles. Bound by the three ports of vector
// arithmetic.
#include <immintrin.h>

#include "cpu/avx2/encode.h"

namespace exl3::avx2 {
namespace {

// The predecessors of a row for one h, repeated over the lanes of each half.
template <int K>
static inline __m256i load_old(const int16_t* p) {
  if constexpr (K == 1) return _mm256_loadu_si256((const __m256i*)p);
  if constexpr (K == 2) return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return _mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i*)p));
}

// Differences that saturate are far beyond the bound. vpmulhrsw rounds halves up; of the negative
// square of a wide edge, so that those of the square go down.
template <bool kWide>
static inline __m256i edge(__m256i x, __m256i y) {
  const __m256i most = _mm256_set1_epi16(kEncodeCoarseMost);
  const __m256i up = _mm256_subs_epi16(x, y);
  if (!kWide) return _mm256_min_epi16(_mm256_mulhrs_epi16(up, up), most);
  const __m256i down = _mm256_subs_epi16(y, x), zero = _mm256_sub_epi16(x, x);
  const __m256i steps = _mm256_mulhrs_epi16(_mm256_srai_epi16(up, 1), _mm256_srai_epi16(down, 1));
  return _mm256_slli_epi16(_mm256_min_epi16(_mm256_sub_epi16(zero, steps), most), 2);
}

// Table order to node order, and store. Node q * 2^K + j of the row is lane j * R + q.
template <int K>
static inline void store_row(int16_t* to, __m256i a, __m256i b) {
  if constexpr (K == 3) {  // R = 4: first pairs j, j + 1 in each quarter
    const __m256i pairs = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,  //
                                           0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    a = _mm256_shuffle_epi8(a, pairs);
    b = _mm256_shuffle_epi8(b, pairs);
  }
  // Quarters of R = 4: pairs of j by q; of R = 8: one j by q.
  const __m128i r0 = _mm256_castsi256_si128(a), r1 = _mm256_extracti128_si256(a, 1);
  const __m128i r2 = _mm256_castsi256_si128(b), r3 = _mm256_extracti128_si256(b, 1);
  __m128i out[4];
  if constexpr (K == 1) {
    out[0] = _mm_unpacklo_epi16(r0, r2);
    out[1] = _mm_unpackhi_epi16(r0, r2);
    out[2] = _mm_unpacklo_epi16(r1, r3);
    out[3] = _mm_unpackhi_epi16(r1, r3);
  } else if constexpr (K == 2) {
    const __m128i u0 = _mm_unpacklo_epi16(r0, r1), u1 = _mm_unpackhi_epi16(r0, r1);
    const __m128i v0 = _mm_unpacklo_epi16(r2, r3), v1 = _mm_unpackhi_epi16(r2, r3);
    out[0] = _mm_unpacklo_epi32(u0, v0);
    out[1] = _mm_unpackhi_epi32(u0, v0);
    out[2] = _mm_unpacklo_epi32(u1, v1);
    out[3] = _mm_unpackhi_epi32(u1, v1);
  } else {
    const __m128i u0 = _mm_unpacklo_epi32(r0, r1), u1 = _mm_unpackhi_epi32(r0, r1);
    const __m128i v0 = _mm_unpacklo_epi32(r2, r3), v1 = _mm_unpackhi_epi32(r2, r3);
    out[0] = _mm_unpacklo_epi64(u0, v0);
    out[1] = _mm_unpackhi_epi64(u0, v0);
    out[2] = _mm_unpacklo_epi64(u1, v1);
    out[3] = _mm_unpackhi_epi64(u1, v1);
  }
  for (int i = 0; i < 4; ++i) _mm_storeu_si128((__m128i*)(to + 8 * i), out[i]);
}

template <int K, bool kWide, int B>
static void step(const int16_t* table, EncodeCoarseStep::Tile* const* tiles) {
  constexpr int kNodes = kStates >> K, kFan = 1 << K, kOld = kNodes >> K, kPeriod = 32 >> K;
  __m256i y[B], reference[B];
  for (int b = 0; b < B; ++b) {
    y[b] = _mm256_set1_epi16(tiles[b]->y);
    reference[b] = _mm256_set1_epi16(tiles[b]->reference);
  }
  for (int row = 0; row < kNodes / 32; ++row) {
    __m256i best[B][2];
    for (int b = 0; b < B; ++b) best[b][0] = best[b][1] = _mm256_set1_epi16(INT16_MAX);
#pragma GCC unroll 8
    for (int h = 0; h < kFan; ++h) {
      const __m256i x0 = _mm256_loadu_si256((const __m256i*)table);
      const __m256i x1 = _mm256_loadu_si256((const __m256i*)(table + 16));
      table += 32;
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) {
        const __m256i old = load_old<K>(tiles[b]->before + h * kOld + row * kPeriod);
        best[b][0] = _mm256_min_epi16(best[b][0], _mm256_add_epi16(old, edge<kWide>(x0, y[b])));
        best[b][1] = _mm256_min_epi16(best[b][1], _mm256_add_epi16(old, edge<kWide>(x1, y[b])));
      }
    }
    for (int b = 0; b < B; ++b)
      store_row<K>(tiles[b]->after + row * 32, _mm256_sub_epi16(best[b][0], reference[b]),
                   _mm256_sub_epi16(best[b][1], reference[b]));
  }
}

// The tiles whose edges are wide, or those whose are not.
template <int K, bool kWide>
static void step_some(EncodeCoarseStep& s) {
  EncodeCoarseStep::Tile* some[kEncodeBatch];
  int count = 0;
  for (int i = 0; i < s.count; ++i)
    if (s.tile[i].wide == kWide) some[count++] = &s.tile[i];
  int done = 0;
  for (; done + 2 <= count; done += 2) step<K, kWide, 2>(s.table, some + done);
  if (done < count) step<K, kWide, 1>(s.table, some + done);
}

}  // namespace

void encode_coarse_step(EncodeCoarseStep& s) {
  if (s.bits == 1) return step_some<1, false>(s);
  if (s.bits == 2) return step_some<2, false>(s);
  step_some<3, false>(s);
  step_some<3, true>(s);
}

}  // namespace exl3::avx2
