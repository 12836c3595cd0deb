// Large product in AMX tiles: bfloat16 in, float32 sums.
//
// Tiles are 1 KiB: A has 16 rows of 32 inputs, B has 16 pairs of inputs for 16 columns, C is 16 x
// 16 sums. x is converted once into the workspace, [m/16][k/32] tiles. A task decodes up to 8
// strips times kBlock inputs into B tiles on its stack (second-level cache) and multiplies them
// with all rows, 2 x 2 tiles at a time: 4 tile loads for 4 products, so the products are the bound
// while A and B tiles arrive at 32 bytes a cycle each.
//
// Order of the inputs. State register e of a tile holds lanes t: input 2(t%4) + {0,1,8,9}[e%4],
// column t/4 + 8(e/4). Two neighbouring lanes are one 32-bit element: inputs 4p + {0,2} + ... of
// one column. So B rows need only gather equal p of all columns from two registers, and A has its
// inputs in this order within 16:
//   0 2 | 4 6 | 1 3 | 5 7 | 8 10 | 12 14 | 9 11 | 13 15      (bars: rows of B)
#include "cpu/amx/gemm_large.h"

#include "cpu/avx512/decode_inl.h"

namespace exl3::amx {
namespace {

constexpr int kTileBytes = 1024;
constexpr int kTileInputs = 32;
constexpr int kBlock = 768;      // most inputs decoded at once
constexpr int kGroupStrips = 8;  // most strips decoded at once
constexpr int kBlockTileBytes = kBlock / kTileInputs * kTileBytes;

struct TileConfig {
  uint8_t palette, start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Loads, stores and products of tiles are volatile assembly that the compiler does not know to
// touch memory.
EXL3_STATIC void memory_barrier() { __asm__ volatile("" ::: "memory"); }

// B rows: `even` gathers p = 0, `odd` p = 1, from the registers of e and e + 4.
template <Codebook C>
struct Gather {
  int32_t even[16], odd[16];
};
template <Codebook C>
static constexpr Gather<C> make_gather() {
  Gather<C> g{};
  for (int lane = 0; lane < 16; ++lane) {
    const int element = avx512::state_of_lane<C>(2 * lane) / 2;  // 2 * column + p
    const int column = element / 2;
    (element % 2 ? g.odd : g.even)[column] = lane;
    (element % 2 ? g.odd : g.even)[column + 8] = lane + 16;
  }
  return g;
}

template <Codebook C>
EXL3_STATIC __m512i weights_bf16(__m512i states) {
  __m512 first, second;
  avx512::weights32<C>(states, &first, &second);
  return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

template <Codebook C, int E>
EXL3_STATIC void store_rows(const __m512i* states, const Gather<C>& g, uint8_t* out) {
  const __m512i a = weights_bf16<C>(states[E]), b = weights_bf16<C>(states[E + 4]);
  const __m512i even = _mm512_loadu_si512(g.even), odd = _mm512_loadu_si512(g.odd);
  _mm512_store_si512(out + 128 * E, _mm512_permutex2var_epi32(a, even, b));
  _mm512_store_si512(out + 128 * E + 64, _mm512_permutex2var_epi32(a, odd, b));
}

// `count` trellis tiles of one strip to half a B tile each.
template <Codebook C, int K>
static void decode_strip(const uint16_t* tiles, int64_t count, uint8_t* out) {
  static constexpr Gather<C> kGather = make_gather<C>();
  for (int64_t i = 0; i < count; ++i, tiles += 16 * K, out += kTileBytes / 2) {
    __m512i states[8];
    avx512::tile_states<K>(tiles, states);
    store_rows<C, 0>(states, kGather, out);
    store_rows<C, 1>(states, kGather, out);
    store_rows<C, 2>(states, kGather, out);
    store_rows<C, 3>(states, kGather, out);
  }
}

using DecodeStrip = void (*)(const uint16_t* tiles, int64_t count, uint8_t* out);
#define EXL3_DECODERS(C)                                                           \
  {decode_strip<C, 1>, decode_strip<C, 2>, decode_strip<C, 3>, decode_strip<C, 4>, \
   decode_strip<C, 5>, decode_strip<C, 6>, decode_strip<C, 7>, decode_strip<C, 8>}
constexpr DecodeStrip kDecode[kCodebooks][8] = {
    EXL3_DECODERS(Codebook::k3inst), EXL3_DECODERS(Codebook::kMcg), EXL3_DECODERS(Codebook::kMul1)};

// A C tile in memory.
struct Sums {
  float* at;
  int64_t stride;  // bytes
};

// Tiles 0..3: C; 4, 5: A; 6, 7: B.
static void multiply_2x2(const uint8_t* a0, const uint8_t* a1, const uint8_t* b0, const uint8_t* b1,
                         int64_t steps, const Sums* c, bool add) {
  memory_barrier();
  if (add) {
    _tile_loadd(0, c[0].at, c[0].stride);
    _tile_loadd(1, c[1].at, c[1].stride);
    _tile_loadd(2, c[2].at, c[2].stride);
    _tile_loadd(3, c[3].at, c[3].stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; ++i) {
    const int64_t at = i * kTileBytes;
    _tile_loadd(6, b0 + at, 64);
    _tile_loadd(4, a0 + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b1 + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1 + at, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c[0].at, c[0].stride);
  _tile_stored(1, c[1].at, c[1].stride);
  _tile_stored(2, c[2].at, c[2].stride);
  _tile_stored(3, c[3].at, c[3].stride);
  memory_barrier();
}

static void multiply_1x2(const uint8_t* a, const uint8_t* b0, const uint8_t* b1, int64_t steps,
                         const Sums* c, bool add) {
  memory_barrier();
  if (add) {
    _tile_loadd(0, c[0].at, c[0].stride);
    _tile_loadd(1, c[1].at, c[1].stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int64_t i = 0; i < steps; ++i) {
    const int64_t at = i * kTileBytes;
    _tile_loadd(4, a + at, 64);
    _tile_loadd(6, b0 + at, 64);
    _tile_loadd(7, b1 + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, c[0].at, c[0].stride);
  _tile_stored(1, c[1].at, c[1].stride);
  memory_barrier();
}

// The last C tile of a column, when it has fewer than 16 rows, is kept in a buffer.
struct Tail {
  alignas(64) float sums[2][kTileDim * kTileDim];
};

static void copy_tail(Tail* tail, float* y, int64_t y_stride, int64_t rows, bool load) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int column = 0; column < 2; ++column) {
      float* out = y + r * y_stride + column * kTileDim;
      float* kept = tail->sums[column] + r * kTileDim;
      if (load)
        _mm512_store_ps(kept, _mm512_loadu_ps(out));
      else
        _mm512_storeu_ps(out, _mm512_load_ps(kept));
    }
  }
}

// All rows times one pair of strips and one block of inputs.
static void multiply_pair(const GemmLargeParams& p, int64_t strip, int64_t first_tile,
                          int64_t tiles, const uint8_t* b) {
  const int64_t row_tiles = (p.m + kTileDim - 1) / kTileDim, whole = p.m / kTileDim;
  const int64_t row_bytes = p.k / kTileInputs * kTileBytes;
  const uint8_t* a = static_cast<const uint8_t*>(p.workspace) + first_tile * kTileBytes;
  const int64_t stride = p.y_stride * static_cast<int64_t>(sizeof(float));
  const bool add = first_tile > 0;
  Tail tail;
  for (int64_t i = 0; i < row_tiles; i += 2) {
    float* y = p.y + i * kTileDim * p.y_stride + strip * kTileDim;
    const bool two = i + 1 < row_tiles;
    float* last = two ? y + kTileDim * p.y_stride : y;
    Sums c[4] = {{y, stride}, {y + kTileDim, stride}, {last, stride}, {last + kTileDim, stride}};
    const bool partial = i + (two ? 2 : 1) > whole;
    if (partial) {
      const int at = two ? 2 : 0;
      c[at] = {tail.sums[0], 64};
      c[at + 1] = {tail.sums[1], 64};
      if (add) copy_tail(&tail, last, p.y_stride, p.m % kTileDim, true);
    }
    const uint8_t* a0 = a + i * row_bytes;
    if (two)
      multiply_2x2(a0, a0 + row_bytes, b, b + kBlockTileBytes, tiles, c, add);
    else
      multiply_1x2(a0, b, b + kBlockTileBytes, tiles, c, add);
    if (partial) copy_tail(&tail, last, p.y_stride, p.m % kTileDim, false);
  }
}

}  // namespace

// Groups of 16 rows to A tiles; rows past m are zero.
void gemm_large_inputs(const GemmLargeParams& p, int64_t begin, int64_t end) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  2,  4,  6,  1,  3,  5,  7,  8,  10, 12,
                                                      14, 9,  11, 13, 15, 16, 18, 20, 22, 17, 19,
                                                      21, 23, 24, 26, 28, 30, 25, 27, 29, 31};
  const __m512i index = _mm512_load_si512(kOrder);
  uint8_t* out = static_cast<uint8_t*>(p.workspace) + begin * kTileDim * p.k * 2;
  for (int64_t group = begin; group < end; ++group) {
    for (int64_t at = 0; at < p.k; at += kTileInputs) {
      for (int64_t r = 0; r < kTileDim; ++r, out += 64) {
        const int64_t row = group * kTileDim + r;
        if (row >= p.m) {
          _mm512_store_si512(out, _mm512_setzero_si512());
          continue;
        }
        const float* x = p.x + row * p.x_stride + at;
        const __m512i v = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
        _mm512_store_si512(out, _mm512_permutexvar_epi16(index, v));
      }
    }
  }
}

void gemm_large_strips(const GemmLargeParams& p, int64_t begin, int64_t end) {
  TileConfig config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  memory_barrier();
  _tile_loadconfig(&config);
  alignas(64) uint8_t b[kGroupStrips * kBlockTileBytes];
  const DecodeStrip decode = kDecode[static_cast<int>(p.codebook)][p.bits - 1];
  const int64_t blocks = (p.k + kBlock - 1) / kBlock, tiles = p.k / kTileInputs;
  for (int64_t strip = begin; strip < end; strip += kGroupStrips) {
    const int64_t count = end - strip < kGroupStrips ? end - strip : kGroupStrips;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = tiles * block / blocks;
      const int64_t block_tiles = tiles * (block + 1) / blocks - first;
      for (int64_t s = 0; s < count; ++s) {
        const int64_t at = (strip + s) * (p.k / kTileDim) + 2 * first;
        decode(p.planes + at * 16 * p.bits, 2 * block_tiles, b + s * kBlockTileBytes);
      }
      for (int64_t s = 0; s < count; s += 2) {
        multiply_pair(p, strip + s, first, block_tiles, b + s * kBlockTileBytes);
      }
    }
  }
  _tile_release();
}

}  // namespace exl3::amx
