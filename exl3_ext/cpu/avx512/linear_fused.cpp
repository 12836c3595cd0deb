// Inner product of mul1 weights for one to four rows, all in registers: nothing but the stream of
// packed words and the activations is read.
//
// On bytes (8-bit activations):  sum_i q_i (b0 + b1 + b2 + b3)_i,  every q_i four times over in two
// vpdpbusd. Per 32 weights three multiplies, an addition, two vpdpbusd a row, and the funnel
// shifts. On words (16-bit activations): three instructions add the bytes, a row takes one
// vpdpwssd. Predicted from two vector ports at 4 bits and one row: 55 instructions per 256 weights
// on bytes, 27.5 cycles, 9.3 weights a cycle; measured 8.5 (the multiplies run at 0.55 cycles, not
// 0.5, on the Xeon with AMX at hand). So ports bound it, not memory: see prefetch_ahead.
#include "cpu/avx512/linear.h"
#include "cpu/avx512/sums.h"
#include "cpu/avx512/values.h"

namespace exl3::avx512 {
namespace {

// On bytes the halves of the product have sums of their own: a vpdpbusd takes five cycles.
// sums[row][2 * (column / 8) + half].
template <int R, bool kOnBytes, int K, int E>
EXL3_STATIC void add_states(const Planes<K>& planes, const int16_t* const* q, int64_t at,
                            __m512i (*sums)[4]) {
  constexpr int kSide = 2 * (E / 4);
  const __m512i s = state<E>(planes);
  Product x{};
  __m512i sum{};
  if constexpr (kOnBytes)
    x = multiply<kMul1Mul>(s);
  else
    sum = byte_sums(s);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m512i four = broadcast4(q[r] + at + 4 * (E % 4));
    if constexpr (kOnBytes) {
      sums[r][kSide] = _mm512_dpbusd_epi32(sums[r][kSide], x.lo, four);
      sums[r][kSide + 1] = _mm512_dpbusd_epi32(sums[r][kSide + 1], x.hi, four);
    } else {
      sums[r][kSide] = _mm512_dpwssd_epi32(sums[r][kSide], sum, four);
    }
  }
}

template <int R, bool kOnBytes, int K>
EXL3_STATIC void add_tile(const uint16_t* tile, const int16_t* const* q, int64_t at,
                          __m512i (*sums)[4]) {
  prefetch_ahead<K>(tile);
  const Planes<K> planes = load_planes<K>(tile);
  add_states<R, kOnBytes, K, 0>(planes, q, at, sums);
  add_states<R, kOnBytes, K, 4>(planes, q, at, sums);
  add_states<R, kOnBytes, K, 1>(planes, q, at, sums);
  add_states<R, kOnBytes, K, 5>(planes, q, at, sums);
  add_states<R, kOnBytes, K, 2>(planes, q, at, sums);
  add_states<R, kOnBytes, K, 6>(planes, q, at, sums);
  add_states<R, kOnBytes, K, 3>(planes, q, at, sums);
  add_states<R, kOnBytes, K, 7>(planes, q, at, sums);
}

// Strips [begin, end), rows row0 .. row0 + R - 1.
template <int R, bool kOnBytes, int K>
void strips(const LinearStrips& s, int64_t row0) {
  const int64_t blocks = s.k / kHadamardDim;
  const int16_t* q[R];
  const LinearBlockMeta* meta[R];
  float base[R];
  for (int r = 0; r < R; ++r) {
    q[r] = s.q + (row0 + r) * s.k;
    meta[r] = s.meta + (row0 + r) * blocks;
    base[r] = row_base(meta[r], blocks);
  }
  const uint16_t* tile = s.planes + s.begin * s.k * K;
  for (int64_t strip = s.begin; strip < s.end; ++strip) {
    __m512 total[R];
    for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_ps();
    for (int64_t block = 0; block < blocks; ++block) {
      __m512i sums[R][4];
      for (int r = 0; r < R; ++r) {
        sums[r][0] = sums[r][2] = initial_sums(meta[r][block]);
        sums[r][1] = sums[r][3] = _mm512_setzero_si512();
      }
      for (int t = 0; t < 8; ++t, tile += 16 * K) {
        add_tile<R, kOnBytes, K>(tile, q, block * kHadamardDim + 16 * t, sums);
      }
      for (int r = 0; r < R; ++r) {
        total[r] = add_block(total[r], _mm512_add_epi32(sums[r][0], sums[r][1]),
                             _mm512_add_epi32(sums[r][2], sums[r][3]), meta[r][block]);
      }
    }
    for (int r = 0; r < R; ++r) {
      _mm512_storeu_ps(inner_at(s, strip, row0 + r),
                       _mm512_add_ps(total[r], _mm512_set1_ps(base[r])));
    }
  }
}

using Strips = void (*)(const LinearStrips&, int64_t);
template <int R, bool kOnBytes>
struct PerRate {
  static constexpr Strips kOf[8] = {strips<R, kOnBytes, 1>, strips<R, kOnBytes, 2>,
                                    strips<R, kOnBytes, 3>, strips<R, kOnBytes, 4>,
                                    strips<R, kOnBytes, 5>, strips<R, kOnBytes, 6>,
                                    strips<R, kOnBytes, 7>, strips<R, kOnBytes, 8>};
};

}  // namespace

void linear_bytes(const LinearStrips& s) {
  for (int64_t row = 0; row < s.m; ++row) PerRate<1, true>::kOf[s.bits - 1](s, row);
}

void linear_words_fused(const LinearStrips& s) {
  constexpr Strips const* kRows[4] = {PerRate<1, false>::kOf, PerRate<2, false>::kOf,
                                      PerRate<3, false>::kOf, PerRate<4, false>::kOf};
  for (int64_t row = 0; row < s.m; row += 4) {
    const int64_t rows = s.m - row < 4 ? s.m - row : 4;
    kRows[rows - 1][s.bits - 1](s, row);
  }
}

}  // namespace exl3::avx512
