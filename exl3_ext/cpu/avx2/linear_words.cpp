// Inner product of weights as 16-bit integers and 16-bit activations on AVX2; every codebook.
//
// As avx512/linear_words.cpp: a 128 x 16 block of weights is decoded to a 4 KB buffer, then
// multiplied with the rows, two at a time (vpmaddwd and an addition: 16 products). Decoding mul1
// takes 7 instructions per 16 weights and about 3 for the state; a row adds two. Predicted from
// three vector ports at 4 bits, one row: 64 cycles per 256 weights.
#include "cpu/avx2/linear.h"
#include "cpu/avx2/values.h"

namespace exl3::avx2 {
namespace {

constexpr int kTiles = kHadamardDim / kTileDim;
constexpr int kRows = 2;  // rows of one pass over the buffer: four accumulators each

struct Buffer {
  alignas(32) int16_t v[kTiles][8][32];  // [tile][e][t]
};

template <int K, Codebook C>
void decode_block(const uint16_t* tile, Buffer* buffer) {
  for (int i = 0; i < kTiles; ++i, tile += 16 * K) {
    for (int line = 0; line < 32 * K; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(tile) + 2048 + line, _MM_HINT_T0);
    }
    Lanes states[8];
    tile_states<K>(tile, states);
#pragma GCC unroll 8
    for (int e = 0; e < 8; ++e) {
      __m256i* to = reinterpret_cast<__m256i*>(buffer->v[i][e]);
      _mm256_store_si256(to, weight_values<C>(states[e].lo));
      _mm256_store_si256(to + 1, weight_values<C>(states[e].hi));
    }
  }
}

using Decode = void (*)(const uint16_t*, Buffer*);
template <Codebook C>
struct DecodeOf {
  static constexpr Decode kBits[8] = {decode_block<1, C>, decode_block<2, C>, decode_block<3, C>,
                                      decode_block<4, C>, decode_block<5, C>, decode_block<6, C>,
                                      decode_block<7, C>, decode_block<8, C>};
};

Decode decode_of(Codebook codebook, int bits) {
  switch (codebook) {
    case Codebook::kMul1:
      return DecodeOf<Codebook::kMul1>::kBits[bits - 1];
    case Codebook::kMcg:
      return DecodeOf<Codebook::kMcg>::kBits[bits - 1];
    default:
      return DecodeOf<Codebook::k3inst>::kBits[bits - 1];
  }
}

EXL3_STATIC __m256i broadcast4(const void* four) {
  int64_t bits;
  __builtin_memcpy(&bits, four, 8);
  return _mm256_set1_epi64x(bits);
}

EXL3_STATIC __m256i eight_columns(__m256i left, __m256i right) {
  return _mm256_permute4x64_epi64(_mm256_hadd_epi32(left, right), 0xD8);  // 0 1 4 5 2 3 6 7
}

// totals[row][column / 8] += the block. Lanes 2i and 2i + 1 of sums[r][c] are parts of column 4c +
// i.
template <int R>
void multiply_rows(const Buffer& buffer, const LinearStrips& s, int64_t row0, int64_t block,
                   __m256 (*totals)[2]) {
  const int64_t blocks = s.k / kHadamardDim;
  const int16_t* q = s.q + row0 * s.k + block * kHadamardDim;
  const LinearBlockMeta* meta = s.meta + row0 * blocks + block;
  __m256i sums[R][4];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
    sums[r][0] = sums[r][1] = sums[r][2] = sums[r][3] =
        _mm256_set1_epi64x(static_cast<uint32_t>(meta[r * blocks].init));
  }
  for (int i = 0; i < kTiles; ++i) {
#pragma GCC unroll 4
    for (int e = 0; e < 4; ++e) {
      const __m256i* left = reinterpret_cast<const __m256i*>(buffer.v[i][e]);
      const __m256i* right = reinterpret_cast<const __m256i*>(buffer.v[i][e + 4]);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        const __m256i four = broadcast4(q + r * s.k + 16 * i + 4 * e);
        sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(left[0], four));
        sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(left[1], four));
        sums[r][2] = _mm256_add_epi32(sums[r][2], _mm256_madd_epi16(right[0], four));
        sums[r][3] = _mm256_add_epi32(sums[r][3], _mm256_madd_epi16(right[1], four));
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
    const __m256 scale = _mm256_set1_ps(meta[r * blocks].scale);
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const __m256i sum = eight_columns(sums[r][2 * c], sums[r][2 * c + 1]);
      totals[r][c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, totals[r][c]);
    }
  }
}

constexpr int kRowChunk = 64;  // rows that share one decoding

void strip_rows(const LinearStrips& s, int64_t strip, int64_t row0, int rows, Decode decode) {
  const int64_t blocks = s.k / kHadamardDim;
  const int64_t block_words = kTiles * 16 * s.bits;
  const uint16_t* planes = s.planes + strip * blocks * block_words;
  Buffer buffer;
  __m256 totals[kRowChunk][2];
  for (int r = 0; r < rows; ++r) {
    totals[r][0] = totals[r][1] = _mm256_setzero_ps();
  }
  for (int64_t block = 0; block < blocks; ++block, planes += block_words) {
    decode(planes, &buffer);
    int r = 0;
    for (; r + kRows <= rows; r += kRows) {
      multiply_rows<kRows>(buffer, s, row0 + r, block, totals + r);
    }
    if (r < rows) multiply_rows<1>(buffer, s, row0 + r, block, totals + r);
  }
  for (int r = 0; r < rows; ++r) {
    float base = 0.0f;
    for (int64_t b = 0; b < blocks; ++b) base += s.meta[(row0 + r) * blocks + b].offset;
    float* inner = inner_at(s, strip, row0 + r);
    for (int c = 0; c < 2; ++c) {
      _mm256_storeu_ps(inner + 8 * c, _mm256_add_ps(totals[r][c], _mm256_set1_ps(base)));
    }
  }
}

}  // namespace

void linear_words(const LinearStrips& s) {
  const Decode decode = decode_of(s.codebook, s.bits);
  for (int64_t strip = s.begin; strip < s.end; ++strip) {
    for (int64_t row = 0; row < s.m; row += kRowChunk) {
      const int rows = static_cast<int>(s.m - row < kRowChunk ? s.m - row : kRowChunk);
      strip_rows(s, strip, row, rows, decode);
    }
  }
}

}  // namespace exl3::avx2
