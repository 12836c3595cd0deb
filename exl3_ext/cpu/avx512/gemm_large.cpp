// Large product in float32 fused multiply-adds.
//
// Decoded weights stay in the order of the state registers, so decoding moves nothing: register e
// of a tile has, in lane t, input 2(t%4) + {0,1,8,9}[e%4] of column t/4 + 8(e/4). Four neighbouring
// lanes are four inputs of one column; x comes as those four inputs in every group of four lanes
// (one broadcast load), and sums of 4 columns x 4 inputs are added up once, at the end of a block.
//   x within 16 inputs: 0 2 4 6 | 1 3 5 7 | 8 10 12 14 | 9 11 13 15      (bars: registers e)
// A block is 256 inputs of one strip: 16 KiB, in the first-level cache. 6 rows x 4 registers of
// sums: 10 loads for 24 multiply-adds, so the multiply-adds are the bound. Blocks of 8 strips are
// decoded together and take turns on 96 rows of x, which stay in the second-level cache.
#include "cpu/avx512/gemm_large.h"

#include "cpu/avx512/decode_inl.h"

namespace exl3::avx512 {
namespace {

constexpr int kBlockTiles = 16;
constexpr int kRows = 6;
constexpr int kGroupStrips = 8;
constexpr int kGroupRows = 96;

// Column of lanes 4i..4i+3 of the four registers -> their place in the sums that `column_sums`
// leaves: sum of register r, lanes 4i.., is element 4i + r.
template <Codebook C>
struct Columns {
  int32_t from[16];
};
template <Codebook C>
static constexpr Columns<C> make_columns() {
  Columns<C> c{};
  for (int r = 0; r < 4; ++r) {
    for (int i = 0; i < 4; ++i) {
      c.from[state_of_lane<C>(16 * (r % 2) + 4 * i) / 4 + 8 * (r / 2)] = 4 * i + r;
    }
  }
  return c;
}

EXL3_STATIC __m512 column_sums(__m512 v0, __m512 v1, __m512 v2, __m512 v3, __m512i from) {
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v0, v1), _mm512_unpackhi_ps(v0, v1));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v2, v3), _mm512_unpackhi_ps(v2, v3));
  const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
  return _mm512_permutexvar_ps(from, sums);
}

template <Codebook C, int E>
EXL3_STATIC void store_weights(const __m512i* states, float* w) {
  __m512 v[4];
  weights32<C>(states[E], &v[0], &v[1]);
  weights32<C>(states[E + 4], &v[2], &v[3]);
  for (int i = 0; i < 4; ++i) _mm512_store_ps(w + 64 * E + 16 * i, v[i]);
}

template <Codebook C, int K>
static void decode_tiles(const uint16_t* tiles, int64_t count, float* w) {
  for (int64_t i = 0; i < count; ++i, tiles += 16 * K, w += kTileNumel) {
    __m512i states[8];
    tile_states<K>(tiles, states);
    store_weights<C, 0>(states, w);
    store_weights<C, 1>(states, w);
    store_weights<C, 2>(states, w);
    store_weights<C, 3>(states, w);
  }
}

// R rows of x times one block; `from` as in Columns.
template <int R>
static void multiply_rows(const float* x, int64_t x_stride, const float* w, int64_t tiles, float* y,
                          int64_t y_stride, __m512i from, bool add) {
  __m512 sums[R][4];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    sums[r][0] = sums[r][1] = sums[r][2] = sums[r][3] = _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < 4 * tiles; ++i, w += 64) {
    const __m512 w0 = _mm512_load_ps(w), w1 = _mm512_load_ps(w + 16);
    const __m512 w2 = _mm512_load_ps(w + 32), w3 = _mm512_load_ps(w + 48);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512 v = _mm512_broadcast_f32x4(_mm_load_ps(x + r * x_stride + 4 * i));
      sums[r][0] = _mm512_fmadd_ps(v, w0, sums[r][0]);
      sums[r][1] = _mm512_fmadd_ps(v, w1, sums[r][1]);
      sums[r][2] = _mm512_fmadd_ps(v, w2, sums[r][2]);
      sums[r][3] = _mm512_fmadd_ps(v, w3, sums[r][3]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    __m512 out = column_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3], from);
    if (add) out = _mm512_add_ps(out, _mm512_loadu_ps(y + r * y_stride));
    _mm512_storeu_ps(y + r * y_stride, out);
  }
}

using Decode = void (*)(const uint16_t* tiles, int64_t count, float* w);
using Multiply = void (*)(const float* x, int64_t x_stride, const float* w, int64_t tiles, float* y,
                          int64_t y_stride, __m512i from, bool add);
#define EXL3_DECODERS(C)                                                           \
  {decode_tiles<C, 1>, decode_tiles<C, 2>, decode_tiles<C, 3>, decode_tiles<C, 4>, \
   decode_tiles<C, 5>, decode_tiles<C, 6>, decode_tiles<C, 7>, decode_tiles<C, 8>}
constexpr Decode kDecode[kCodebooks][8] = {
    EXL3_DECODERS(Codebook::k3inst), EXL3_DECODERS(Codebook::kMcg), EXL3_DECODERS(Codebook::kMul1)};
constexpr Multiply kMultiply[kRows] = {multiply_rows<1>, multiply_rows<2>, multiply_rows<3>,
                                       multiply_rows<4>, multiply_rows<5>, multiply_rows<6>};
constexpr Columns<Codebook::k3inst> kHalfColumns = make_columns<Codebook::k3inst>();
constexpr Columns<Codebook::kMul1> kMul1Columns = make_columns<Codebook::kMul1>();

// Rows [begin, end) times one block of a strip.
static void multiply_block(const GemmLargeParams& p, const float* w, int64_t strip, int64_t first,
                           int64_t begin, int64_t end) {
  const __m512i from =
      _mm512_loadu_si512(p.codebook == Codebook::kMul1 ? kMul1Columns.from : kHalfColumns.from);
  const int64_t tiles = p.k / kTileDim - first < kBlockTiles ? p.k / kTileDim - first : kBlockTiles;
  const float* x = static_cast<const float*>(p.workspace) + first * kTileDim;
  for (int64_t row = begin; row < end; row += kRows) {
    const int64_t rows = end - row < kRows ? end - row : kRows;
    kMultiply[rows - 1](x + row * p.k, p.k, w, tiles, p.y + row * p.y_stride + strip * kTileDim,
                        p.y_stride, from, first > 0);
  }
}

}  // namespace

// Rows of x, float32, reordered within 16 inputs.
void gemm_large_inputs(const GemmLargeParams& p, int64_t begin, int64_t end) {
  const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  const int64_t last = end * kTileDim < p.m ? end * kTileDim : p.m;
  for (int64_t row = begin * kTileDim; row < last; ++row) {
    const float* x = p.x + row * p.x_stride;
    float* out = static_cast<float*>(p.workspace) + row * p.k;
    for (int64_t i = 0; i < p.k; i += 16) {
      _mm512_store_ps(out + i, _mm512_permutexvar_ps(order, _mm512_loadu_ps(x + i)));
    }
  }
}

void gemm_large_strips(const GemmLargeParams& p, int64_t begin, int64_t end) {
  alignas(64) float w[kGroupStrips][kBlockTiles * kTileNumel];
  const Decode decode = kDecode[static_cast<int>(p.codebook)][p.bits - 1];
  const int64_t tiles = p.k / kTileDim;
  for (int64_t group = begin; group < end; group += kGroupStrips) {
    const int64_t strips = end - group < kGroupStrips ? end - group : kGroupStrips;
    for (int64_t first = 0; first < tiles; first += kBlockTiles) {
      const int64_t count = tiles - first < kBlockTiles ? tiles - first : kBlockTiles;
      for (int64_t s = 0; s < strips; ++s) {
        decode(p.planes + ((group + s) * tiles + first) * 16 * p.bits, count, w[s]);
      }
      for (int64_t row = 0; row < p.m; row += kGroupRows) {
        const int64_t last = p.m - row < kGroupRows ? p.m : row + kGroupRows;
        for (int64_t s = 0; s < strips; ++s) multiply_block(p, w[s], group + s, first, row, last);
      }
    }
  }
}

}  // namespace exl3::avx512
