// Large product in float32: blocks of 128 x 16 weights, decoded once for all rows.
#include "cpu/generic/gemm_large.h"

#include "cpu/generic/codebook.h"
#include "cpu/generic/half.h"
#include "cpu/generic/trellis.h"
#include "exl3/codebook.h"

namespace exl3::generic {
namespace {

constexpr int kBlockTiles = 8;  // 128 inputs: 8 KiB of decoded weights

void decode_block(const GemmLargeParams& p, const uint16_t* tiles, float (*w)[kTileDim]) {
  const half_bits* values = codebook_values(p.codebook);
  uint16_t states[kTileNumel];
  for (int tile = 0; tile < kBlockTiles; ++tile) {
    plane_states(tiles + tile * 16 * p.bits, p.bits, states);
    for (int i = 0; i < kTileNumel; ++i) {
      w[tile * kTileDim + tile_row(i)][tile_col(i)] = half_to_float(values[states[i]]);
    }
  }
}

}  // namespace

void gemm_large_strips(const GemmLargeParams& p, int64_t begin, int64_t end) {
  float w[kBlockTiles * kTileDim][kTileDim];
  for (int64_t strip = begin; strip < end; ++strip) {
    float* y = p.y + strip * kTileDim;
    for (int64_t at = 0; at < p.k; at += kHadamardDim) {
      decode_block(p, p.planes + (strip * p.k + at) * p.bits, w);
      for (int64_t row = 0; row < p.m; ++row) {
        const float* x = p.x + row * p.x_stride + at;
        float* out = y + row * p.y_stride;
        float sum[kTileDim] = {};
        for (int i = 0; i < kHadamardDim; ++i) {
          for (int c = 0; c < kTileDim; ++c) sum[c] += x[i] * w[i][c];
        }
        for (int c = 0; c < kTileDim; ++c) out[c] = at == 0 ? sum[c] : out[c] + sum[c];
      }
    }
  }
}

}  // namespace exl3::generic
