// Exact decoding of tiles as stored in files: bytes to lane planes in registers, then 32 weights at
// a time. Bound by arithmetic: about 30 instructions for 32 weights.
#include "cpu/avx512/trellis.h"

#include "cpu/avx512/decode_inl.h"
#include "cpu/generic/trellis.h"

namespace exl3::avx512 {
namespace {

// Words of the registers of e and e + 4 -> rows q and q + 1 of 16 columns.
//   row 2q + {0,1,8,9}[e], column c: state 4(c%8) + q of register e + 4(c/8)
struct Rows {
  uint16_t from[2][32];  // q = 0 and q = 2
};
template <Codebook C>
static constexpr Rows make_rows() {
  Rows rows{};
  for (int lane = 0; lane < 32; ++lane) {
    const int state = state_of_lane<C>(lane), q = state % 4, column = state / 4;
    rows.from[q / 2][q % 2 * 16 + column] = static_cast<uint16_t>(lane);
    rows.from[q / 2][q % 2 * 16 + column + 8] = static_cast<uint16_t>(lane + 32);
  }
  return rows;
}

// A stored tile to lane planes: up to 256 bytes, any order.
template <int K>
EXL3_STATIC void to_planes(const uint16_t* stored, const uint8_t* order, uint16_t* planes) {
  constexpr int kBytes = 32 * K;
  const uint8_t* in = reinterpret_cast<const uint8_t*>(stored);
  uint8_t* out = reinterpret_cast<uint8_t*>(planes);
  __m512i source[4];
  for (int i = 0; i < 4; ++i) {
    const int left = kBytes - 64 * i;
    const __mmask64 have = left >= 64 ? ~0ull : left > 0 ? (1ull << left) - 1 : 0;
    source[i] = _mm512_maskz_loadu_epi8(have, in + 64 * i);
  }
  for (int i = 0; 64 * i < kBytes; ++i) {
    const __mmask64 have = kBytes - 64 * i >= 64 ? ~0ull : (1ull << 32) - 1;
    const __m512i index = _mm512_maskz_loadu_epi8(have, order + 64 * i);
    __m512i bytes = _mm512_permutex2var_epi8(source[0], index, source[1]);
    if constexpr (K > 4) {
      const __m512i high = _mm512_permutex2var_epi8(source[2], index, source[3]);
      bytes = _mm512_mask_mov_epi8(bytes, _mm512_movepi8_mask(index), high);
    }
    _mm512_mask_storeu_epi8(out + 64 * i, have, bytes);
  }
}

// float16 of 32 states, in the order of `state_of_lane`; the only rounding.
template <Codebook C>
EXL3_STATIC __m512i halves(__m512i states) {
  __m512 first, second;
  weights32<C>(states, &first, &second);
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(first, 8)),
                            _mm512_cvtps_ph(second, 8), 1);
}

EXL3_STATIC void store_pair(half_bits* row, int64_t next, __m512i v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), _mm512_castsi512_si256(v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + next), _mm512_extracti64x4_epi64(v, 1));
}

template <Codebook C, int E>
EXL3_STATIC void store_rows(const __m512i* states, const Rows& rows, half_bits* out, int64_t n) {
  constexpr int kRow = E % 2 + 8 * (E / 2);
  const __m512i a = halves<C>(states[E]), b = halves<C>(states[E + 4]);
  for (int i = 0; i < 2; ++i) {
    const __m512i from = _mm512_loadu_si512(rows.from[i]);
    store_pair(out + (kRow + 4 * i) * n, 2 * n, _mm512_permutex2var_epi16(a, from, b));
  }
}

template <Codebook C, int K>
static void decode_rows(const TrellisDecodeParams& p, int64_t begin, int64_t end) {
  static constexpr Rows kRows = make_rows<C>();
  const uint8_t* order = generic::plane_order(K);
  const int64_t columns = p.n / kTileDim;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t j = 0; j < columns; ++j) {
      alignas(64) uint16_t planes[16 * K + 16];
      to_planes<K>(p.trellis + (row * columns + j) * 16 * K, order, planes);
      __m512i states[8];
      tile_states<K>(planes, states);
      half_bits* out = p.w + row * kTileDim * p.n + j * kTileDim;
      store_rows<C, 0>(states, kRows, out, p.n);
      store_rows<C, 1>(states, kRows, out, p.n);
      store_rows<C, 2>(states, kRows, out, p.n);
      store_rows<C, 3>(states, kRows, out, p.n);
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

}  // namespace exl3::avx512
