// One step of the trellis search (cpu/encode_step.h) in AVX2.
//
// A row of 16 nodes is two registers per tile. Per 8 edges of a tile: vpmaddwd, vpaddd and vpminsd
// (4 bits), or a subtraction more (the others); one broadcast load serves both halves of a
// row, the load of the table row all tiles. Bound by the three ports of vector arithmetic.
#include "cpu/avx2/encode.h"

#include <immintrin.h>

namespace exl3::avx2 {
namespace {

template <int K>
static inline __m256i relax(__m256i best, __m256i old, __m256i x, __m256i y) {
  if constexpr (K > kEncodeTaggedBits) {
    x = _mm256_sub_epi16(x, y);
    y = x;
  }
  return _mm256_min_epi32(best, _mm256_add_epi32(old, _mm256_madd_epi16(x, y)));
}

// The low byte of every lane of a row.
static inline __m128i low_bytes(__m256i a, __m256i b) {
  const __m256i low = _mm256_set1_epi32(255);
  __m256i words = _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
  words = _mm256_permute4x64_epi64(words, 0xD8);
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

static inline int32_t least(__m256i v) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256((__m256i*)lanes, v);
  int32_t low = lanes[0];
  for (int i = 1; i < 8; ++i) low = lanes[i] < low ? lanes[i] : low;
  return low;
}

template <int K, int B>
static void step(const int16_t* table, EncodeStep::Tile* tiles) {
  constexpr int kNodes = kStates >> K, kFan = 1 << K, kOld = kNodes >> K;
  constexpr bool kTagged = K == kEncodeTaggedBits;
  const __m256i cap = _mm256_set1_epi32(kEncodeCap);
  __m256i y[B], shift[B], low[B];
  for (int b = 0; b < B; ++b) {
    const EncodeStep::Tile& t = tiles[b];
    y[b] = _mm256_set1_epi32((uint16_t)t.y[0] | (uint32_t)(uint16_t)t.y[1] << 16);
    shift[b] = _mm256_set1_epi32(encode_shift(K, t.low));
    low[b] = cap;
  }
  for (int row = 0; row < kNodes / 16; ++row) {
    const int first = row >> (K - 4);
    __m256i best[B][2];
    for (int b = 0; b < B; ++b) best[b][0] = best[b][1] = _mm256_add_epi32(cap, shift[b]);
#pragma GCC unroll 4
    for (int h = 0; h < kFan; ++h) {
      const __m256i x0 = _mm256_loadu_si256((const __m256i*)table);
      const __m256i x1 = _mm256_loadu_si256((const __m256i*)(table + 16));
      table += 32;
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const __m256i old = _mm256_set1_epi32(tiles[b].before[h * kOld + first]);
        best[b][0] = relax<K>(best[b][0], old, x0, y[b]);
        best[b][1] = relax<K>(best[b][1], old, x1, y[b]);
      }
    }
    for (int b = 0; b < B; ++b) {
      const EncodeStep::Tile& t = tiles[b];
      __m256i c0 = _mm256_sub_epi32(best[b][0], shift[b]);
      __m256i c1 = _mm256_sub_epi32(best[b][1], shift[b]);
      if constexpr (kTagged) {
        const __m128i bytes = low_bytes(best[b][0], best[b][1]);
        for (int i = 0; i < K; ++i)
          t.choice[row * K + i] = (uint16_t)_mm_movemask_epi8(_mm_slli_epi16(bytes, 7 - i));
        const __m256i keep = _mm256_set1_epi32(encode_keep(K));
        const __m256i tag = _mm256_set1_epi32(row >> (12 - 2 * K));
        c0 = _mm256_or_si256(_mm256_and_si256(c0, keep), tag);
        c1 = _mm256_or_si256(_mm256_and_si256(c1, keep), tag);
      }
      low[b] = _mm256_min_epi32(low[b], _mm256_min_epi32(c0, c1));
      _mm256_storeu_si256((__m256i*)(t.after + row * 16), c0);
      _mm256_storeu_si256((__m256i*)(t.after + row * 16 + 8), c1);
    }
  }
  for (int b = 0; b < B; ++b) tiles[b].low = least(low[b]);
}

template <int K>
static void step_of(EncodeStep& s) {
  int done = 0;
  for (; done + 2 <= s.count; done += 2) step<K, 2>(s.table, s.tile + done);
  if (done < s.count) step<K, 1>(s.table, s.tile + done);
}

}  // namespace

void encode_step(EncodeStep& s) {
  using Fn = void (*)(EncodeStep&);
  static constexpr Fn kByBits[] = {step_of<4>, step_of<5>, step_of<6>, step_of<7>, step_of<8>};
  kByBits[s.bits - 4](s);
}

}  // namespace exl3::avx2
