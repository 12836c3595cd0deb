// Exact decoding of tiles as stored in files: bytes to lane planes, then 16 weights at a time.
#include "cpu/avx2/trellis.h"

#include "cpu/avx2/decode_inl.h"
#include "cpu/generic/trellis.h"

namespace exl3::avx2 {
namespace {

// float16 of 16 states, in the order of `state_of_lane`; the only rounding.
template <Codebook C>
EXL3_STATIC void store_halves(__m256i states, half_bits* out) {
  __m256 first, second;
  weights16<C>(states, &first, &second);
  _mm_store_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(first, 0));
  _mm_store_si128(reinterpret_cast<__m128i*>(out + 8), _mm256_cvtps_ph(second, 0));
}

template <Codebook C, int K>
static void decode_tile(const uint16_t* stored, const uint8_t* order, half_bits* out, int64_t n) {
  alignas(32) uint8_t planes[32 * K + 32];
  const uint8_t* in = reinterpret_cast<const uint8_t*>(stored);
  for (int i = 0; i < 32 * K; ++i) planes[i] = in[order[i]];
  Lanes states[8];
  tile_states<K>(reinterpret_cast<const uint16_t*>(planes), states);
  alignas(32) half_bits values[32];
  for (int e = 0; e < 8; ++e) {
    store_halves<C>(states[e].lo, values);
    store_halves<C>(states[e].hi, values + 16);
    half_bits* at = out + tile_row(e) * n + tile_col(e);
    for (int lane = 0; lane < 32; ++lane) {
      const int state = state_of_lane<C>(lane % 16) + lane / 16 * 16;
      at[state % 4 * 2 * n + state / 4] = values[lane];
    }
  }
}

template <Codebook C, int K>
static void decode_rows(const TrellisDecodeParams& p, int64_t begin, int64_t end) {
  const uint8_t* order = generic::plane_order(K);
  const int64_t columns = p.n / kTileDim;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t j = 0; j < columns; ++j) {
      decode_tile<C, K>(p.trellis + (row * columns + j) * 16 * K, order,
                        p.w + row * kTileDim * p.n + j * kTileDim, p.n);
    }
  }
}

using Decode = void (*)(const TrellisDecodeParams& p, int64_t begin, int64_t end);
#define EXL3_DECODERS(C)                                                       \
  {decode_rows<C, 1>, decode_rows<C, 2>, decode_rows<C, 3>, decode_rows<C, 4>, \
   decode_rows<C, 5>, decode_rows<C, 6>, decode_rows<C, 7>, decode_rows<C, 8>}
constexpr Decode kDecode[kCodebooks][8] = {
    EXL3_DECODERS(Codebook::k3inst), EXL3_DECODERS(Codebook::kMcg), EXL3_DECODERS(Codebook::kMul1)};

}  // namespace

// Rows [begin, end) of tiles, counted over the batch.
void trellis_decode(const TrellisDecodeParams& p, int64_t begin, int64_t end) {
  kDecode[static_cast<int>(p.codebook)][p.bits - 1](p, begin, end);
}

}  // namespace exl3::avx2
