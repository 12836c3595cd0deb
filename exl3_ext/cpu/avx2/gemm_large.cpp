// Large product in float32 fused multiply-adds. As avx512/gemm_large.cpp, with registers of 2
// columns x 4 inputs and half a strip (8 columns) at a time: 3 rows x 4 registers of sums.
#include "cpu/avx2/gemm_large.h"

#include "cpu/avx2/decode_inl.h"

namespace exl3::avx2 {
namespace {

constexpr int kBlockTiles = 16;
constexpr int kRows = 3;
constexpr int kGroupStrips = 8;
constexpr int kGroupRows = 96;
constexpr int kHalfNumel = kTileNumel / 2;
constexpr int kHalfColumns = kTileDim / 2;

// Column of lanes 4i..4i+3 of the four registers -> their place in the sums that `column_sums`
// leaves: sum of register r, lanes 4i.., is element 4i + r.
template <Codebook C>
struct Columns {
  int32_t from[8];
};
template <Codebook C>
static constexpr Columns<C> make_columns() {
  Columns<C> c{};
  for (int r = 0; r < 4; ++r) {
    for (int i = 0; i < 2; ++i) {
      c.from[state_of_lane<C>(8 * (r % 2) + 4 * i) / 4 + 4 * (r / 2)] = 4 * i + r;
    }
  }
  return c;
}

EXL3_STATIC __m256 column_sums(__m256 v0, __m256 v1, __m256 v2, __m256 v3, __m256i from) {
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(v0, v1), _mm256_hadd_ps(v2, v3));
  return _mm256_permutevar8x32_ps(sums, from);
}

template <Codebook C>
EXL3_STATIC void store_weights(const Lanes& states, float* w) {
  __m256 v[4];
  weights16<C>(states.lo, &v[0], &v[1]);
  weights16<C>(states.hi, &v[2], &v[3]);
  for (int i = 0; i < 4; ++i) _mm256_store_ps(w + 8 * i, v[i]);
}

// Columns 0..7 of all tiles, then columns 8..15.
template <Codebook C, int K>
static void decode_tiles(const uint16_t* tiles, int64_t count, float* w) {
  for (int64_t i = 0; i < count; ++i, tiles += 16 * K, w += kHalfNumel) {
    Lanes states[8];
    tile_states<K>(tiles, states);
    for (int e = 0; e < 4; ++e) {
      store_weights<C>(states[e], w + 32 * e);
      store_weights<C>(states[e + 4], w + kBlockTiles * kHalfNumel + 32 * e);
    }
  }
}

// R rows of x times 8 columns of one block; `from` as in Columns.
template <int R>
static void multiply_rows(const float* x, int64_t x_stride, const float* w, int64_t tiles, float* y,
                          int64_t y_stride, __m256i from, bool add) {
  __m256 sums[R][4];
#pragma GCC unroll 3
  for (int r = 0; r < R; ++r) {
    sums[r][0] = sums[r][1] = sums[r][2] = sums[r][3] = _mm256_setzero_ps();
  }
  for (int64_t i = 0; i < 4 * tiles; ++i, w += 32) {
    __m256 v[R];
#pragma GCC unroll 3
    for (int r = 0; r < R; ++r) {
      v[r] = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(x + r * x_stride + 4 * i));
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256 weights = _mm256_load_ps(w + 8 * j);
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) sums[r][j] = _mm256_fmadd_ps(v[r], weights, sums[r][j]);
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < R; ++r) {
    __m256 out = column_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3], from);
    if (add) out = _mm256_add_ps(out, _mm256_loadu_ps(y + r * y_stride));
    _mm256_storeu_ps(y + r * y_stride, out);
  }
}

using Decode = void (*)(const uint16_t* tiles, int64_t count, float* w);
using Multiply = void (*)(const float* x, int64_t x_stride, const float* w, int64_t tiles, float* y,
                          int64_t y_stride, __m256i from, bool add);
#define EXL3_DECODERS(C)                                                           \
  {decode_tiles<C, 1>, decode_tiles<C, 2>, decode_tiles<C, 3>, decode_tiles<C, 4>, \
   decode_tiles<C, 5>, decode_tiles<C, 6>, decode_tiles<C, 7>, decode_tiles<C, 8>}
constexpr Decode kDecode[kCodebooks][8] = {
    EXL3_DECODERS(Codebook::k3inst), EXL3_DECODERS(Codebook::kMcg), EXL3_DECODERS(Codebook::kMul1)};
constexpr Multiply kMultiply[kRows] = {multiply_rows<1>, multiply_rows<2>, multiply_rows<3>};
constexpr Columns<Codebook::k3inst> kPairColumns = make_columns<Codebook::k3inst>();
constexpr Columns<Codebook::kMul1> kMul1Columns = make_columns<Codebook::kMul1>();

// Rows [begin, end) times one block of a strip.
static void multiply_block(const GemmLargeParams& p, const float* w, int64_t strip, int64_t first,
                           int64_t begin, int64_t end) {
  const __m256i from = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(
      p.codebook == Codebook::kMul1 ? kMul1Columns.from : kPairColumns.from));
  const int64_t tiles = p.k / kTileDim - first < kBlockTiles ? p.k / kTileDim - first : kBlockTiles;
  const float* x = static_cast<const float*>(p.workspace) + first * kTileDim;
  for (int half = 0; half < 2; ++half, w += kBlockTiles * kHalfNumel) {
    float* y = p.y + strip * kTileDim + half * kHalfColumns;
    for (int64_t row = begin; row < end; row += kRows) {
      const int64_t rows = end - row < kRows ? end - row : kRows;
      kMultiply[rows - 1](x + row * p.k, p.k, w, tiles, y + row * p.y_stride, p.y_stride, from,
                          first > 0);
    }
  }
}

}  // namespace

// Rows of x, float32, reordered within 16 inputs: even then odd ones of each 8.
void gemm_large_inputs(const GemmLargeParams& p, int64_t begin, int64_t end) {
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const int64_t last = end * kTileDim < p.m ? end * kTileDim : p.m;
  for (int64_t row = begin * kTileDim; row < last; ++row) {
    const float* x = p.x + row * p.x_stride;
    float* out = static_cast<float*>(p.workspace) + row * p.k;
    for (int64_t i = 0; i < p.k; i += 8) {
      _mm256_store_ps(out + i, _mm256_permutevar8x32_ps(_mm256_loadu_ps(x + i), order));
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

}  // namespace exl3::avx2
