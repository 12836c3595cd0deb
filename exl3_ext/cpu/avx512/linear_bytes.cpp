// Inner product of mul1 weights on the bytes of the product, one or two rows of 8-bit activations.
//
//   sum_i q_i (b0 + b1 + b2 + b3)_i
//
// with every q_i four times over in a vpdpbusd: per 32 weights three multiplies, an addition, two
// vpdpbusd a row, and the funnel shifts. At 4 bits 55 vector instructions per 256 weights and row
// for two ports: 27.5 cycles, 9.3 weights a cycle. Ports bound it, not memory. No workspace; one
// strip is one sequential stream of 16 * bits words a tile.
#include "cpu/avx512/linear.h"
#include "cpu/avx512/sums.h"
#include "cpu/avx512/values.h"

namespace exl3::avx512 {
namespace {

// sums[row][2 * (column / 8) + half of the product]: apart, because a vpdpbusd takes five cycles.
template <int R, int K, int E>
EXL3_STATIC void add_states(const Planes<K>& planes, const __m512i (*q)[4], __m512i (*sums)[4]) {
  __m512i lo, hi;
  product<kMul1Mul>(state<E>(planes), &lo, &hi);
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
    constexpr int kSide = 2 * (E / 4);
    sums[r][kSide] = _mm512_dpbusd_epi32(sums[r][kSide], lo, q[r][E % 4]);
    sums[r][kSide + 1] = _mm512_dpbusd_epi32(sums[r][kSide + 1], hi, q[r][E % 4]);
  }
}

template <int R, int K>
EXL3_STATIC void add_tile(const uint16_t* tile, const int16_t* const* q, int64_t at,
                          __m512i (*sums)[4]) {
  const Planes<K> planes = load_planes<K>(tile);
  __m512i four[R][4];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int e = 0; e < 4; ++e) four[r][e] = broadcast4(q[r] + at + 4 * e);
  }
  add_states<R, K, 0>(planes, four, sums);
  add_states<R, K, 4>(planes, four, sums);
  add_states<R, K, 1>(planes, four, sums);
  add_states<R, K, 5>(planes, four, sums);
  add_states<R, K, 2>(planes, four, sums);
  add_states<R, K, 6>(planes, four, sums);
  add_states<R, K, 3>(planes, four, sums);
  add_states<R, K, 7>(planes, four, sums);
}

// Strips [begin, end), rows row0 .. row0 + R - 1.
template <int R, int K>
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
    __m512 total[R][2];
    for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm512_setzero_ps();
    for (int64_t block = 0; block < blocks; ++block) {
      __m512i sums[R][4];
      for (int r = 0; r < R; ++r) {
        sums[r][0] = sums[r][2] = initial_sums(meta[r][block]);
        sums[r][1] = sums[r][3] = _mm512_setzero_si512();
      }
      for (int t = 0; t < 8; ++t, tile += 16 * K) {
        add_tile<R, K>(tile, q, block * kHadamardDim + 16 * t, sums);
      }
      for (int r = 0; r < R; ++r) {
        const LinearBlockMeta& m = meta[r][block];
        total[r][0] = add_block(total[r][0], _mm512_add_epi32(sums[r][0], sums[r][1]), m);
        total[r][1] = add_block(total[r][1], _mm512_add_epi32(sums[r][2], sums[r][3]), m);
      }
    }
    for (int r = 0; r < R; ++r) {
      store_strip(s.inner + (row0 + r) * s.n + 16 * strip, total[r][0], total[r][1], base[r]);
    }
  }
}

template <int K>
void all_rows(const LinearStrips& s) {
  int64_t row = 0;
  for (; row + 2 <= s.m; row += 2) strips<2, K>(s, row);
  if (row < s.m) strips<1, K>(s, row);
}

constexpr void (*kKernels[8])(const LinearStrips&) = {all_rows<1>, all_rows<2>, all_rows<3>,
                                                      all_rows<4>, all_rows<5>, all_rows<6>,
                                                      all_rows<7>, all_rows<8>};

}  // namespace

void linear_bytes(const LinearStrips& s) { kKernels[s.bits - 1](s); }

}  // namespace exl3::avx512
