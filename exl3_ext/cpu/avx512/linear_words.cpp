// Inner product of weights as 16-bit integers and 16-bit activations; every codebook, any rows.
//
// A 128 x 16 block of weights is decoded to a buffer of 4 KB in the first-level cache, then
// multiplied with the rows, eight at a time (vpdpwssd: 32 products an instruction, memory operand
// from the buffer). Decoding mul1 takes 7 instructions per 32 weights and the funnel shifts, 3inst
// and mcg about 24; a row adds one. Vector ports bound it.
#include "cpu/avx512/linear.h"
#include "cpu/avx512/sums.h"
#include "cpu/avx512/values.h"

namespace exl3::avx512 {
namespace {

constexpr int kTiles = kHadamardDim / kTileDim;
constexpr int kRows = 8;  // rows of one pass over the buffer: two accumulators each

struct Buffer {
  alignas(64) int16_t v[kTiles][8][32];  // [tile][e][t]
};

template <int K, Codebook kCodebook>
void decode_block(const uint16_t* tile, Buffer* buffer) {
  for (int i = 0; i < kTiles; ++i, tile += 16 * K) {
    prefetch_ahead<K>(tile);
    __m512i states[8];
    tile_states<K>(tile, states);
#pragma GCC unroll 8
    for (int e = 0; e < 8; ++e) {
      _mm512_store_si512(buffer->v[i][e], weight_values<kCodebook>(states[e]));
    }
  }
}

using Decode = void (*)(const uint16_t*, Buffer*);
template <Codebook kCodebook>
struct DecodeRow {
  static constexpr Decode kOf[8] = {decode_block<1, kCodebook>, decode_block<2, kCodebook>,
                                    decode_block<3, kCodebook>, decode_block<4, kCodebook>,
                                    decode_block<5, kCodebook>, decode_block<6, kCodebook>,
                                    decode_block<7, kCodebook>, decode_block<8, kCodebook>};
};

Decode decode_of(Codebook codebook, int bits) {
  switch (codebook) {
    case Codebook::kMul1:
      return DecodeRow<Codebook::kMul1>::kOf[bits - 1];
    case Codebook::kMcg:
      return DecodeRow<Codebook::kMcg>::kOf[bits - 1];
    default:
      return DecodeRow<Codebook::k3inst>::kOf[bits - 1];
  }
}

// totals[row] += the block, rows row0 .. row0 + R - 1.
template <int R>
void multiply(const Buffer& buffer, const LinearStrips& s, int64_t row0, int64_t block,
              __m512* totals) {
  const int64_t blocks = s.k / kHadamardDim;
  const int16_t* q = s.q + row0 * s.k + block * kHadamardDim;
  const LinearBlockMeta* meta = s.meta + row0 * blocks + block;
  constexpr int kSets = R <= 2 ? 2 : 1;  // chains of five cycles: enough of them
  __m512i sums[R][2][kSets];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    sums[r][0][0] = sums[r][1][0] = initial_sums(meta[r * blocks]);
    if constexpr (kSets == 2) sums[r][0][1] = sums[r][1][1] = _mm512_setzero_si512();
  }
  for (int i = 0; i < kTiles; ++i) {
#pragma GCC unroll 4
    for (int e = 0; e < 4; ++e) {
      const __m512i left = _mm512_load_si512(buffer.v[i][e]);
      const __m512i right = _mm512_load_si512(buffer.v[i][e + 4]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i four = broadcast4(q + r * s.k + 16 * i + 4 * e);
        __m512i& a = sums[r][0][e % kSets];
        __m512i& b = sums[r][1][e % kSets];
        a = _mm512_dpwssd_epi32(a, left, four);
        b = _mm512_dpwssd_epi32(b, right, four);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    __m512i left = sums[r][0][0], right = sums[r][1][0];
    if constexpr (kSets == 2) {
      left = _mm512_add_epi32(left, sums[r][0][1]);
      right = _mm512_add_epi32(right, sums[r][1][1]);
    }
    totals[r] = add_block(totals[r], left, right, meta[r * blocks]);
  }
}

using Multiply = void (*)(const Buffer&, const LinearStrips&, int64_t, int64_t, __m512*);
constexpr Multiply kMultiply[kRows + 1] = {nullptr,     multiply<1>, multiply<2>,
                                           multiply<3>, multiply<4>, multiply<5>,
                                           multiply<6>, multiply<7>, multiply<8>};

constexpr int kFusedRows = 4;  // up to here mul1 is faster without the buffer
constexpr int kRowChunk = 64;  // rows that share one decoding

void strip_rows(const LinearStrips& s, int64_t strip, int64_t row0, int rows, Decode decode) {
  const int64_t blocks = s.k / kHadamardDim;
  const int64_t block_words = kTiles * 16 * s.bits;
  const uint16_t* planes = s.planes + strip * blocks * block_words;
  Buffer buffer;
  __m512 totals[kRowChunk];
  for (int r = 0; r < rows; ++r) totals[r] = _mm512_setzero_ps();
  for (int64_t block = 0; block < blocks; ++block, planes += block_words) {
    decode(planes, &buffer);
    for (int r = 0; r < rows; r += kRows) {
      kMultiply[rows - r < kRows ? rows - r : kRows](buffer, s, row0 + r, block, totals + r);
    }
  }
  for (int r = 0; r < rows; ++r) {
    const int64_t row = row0 + r;
    const float base = row_base(s.meta + row * blocks, blocks);
    _mm512_storeu_ps(inner_at(s, strip, row), _mm512_add_ps(totals[r], _mm512_set1_ps(base)));
  }
}

}  // namespace

void linear_words(const LinearStrips& s) {
  if (s.codebook == Codebook::kMul1 && s.m <= kFusedRows) return linear_words_fused(s);
  const Decode decode = decode_of(s.codebook, s.bits);
  for (int64_t strip = s.begin; strip < s.end; ++strip) {
    for (int64_t row = 0; row < s.m; row += kRowChunk) {
      const int rows = static_cast<int>(s.m - row < kRowChunk ? s.m - row : kRowChunk);
      strip_rows(s, strip, row, rows, decode);
    }
  }
}

}  // namespace exl3::avx512
