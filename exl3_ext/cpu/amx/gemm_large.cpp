// Large product in AMX tiles: bfloat16 in, float32 sums.
//
// Tiles are 1 KiB: A has 16 rows of 32 inputs, B has 16 pairs of inputs for 16 columns, C is 16 x
// 16 sums. x is converted once into the workspace, [m/16][k/32] tiles. A task decodes up to 8
// strips and kChunk inputs into B tiles on its stack (second-level cache) and multiplies them with
// all rows, 2 x 2 tiles at a time: 4 tile loads for 4 products. 32 rows pass over the chunk in
// panels of kPanel inputs, so that the A tiles of a panel stay in the first-level cache for all
// strips; the sums of the 32 rows wait in a buffer between panels.
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
constexpr int kChunk = 1536 / kTileInputs;  // most tiles of inputs decoded at once
constexpr int kPanel = 320 / kTileInputs;   // tiles of inputs whose A and B tiles share the L1
constexpr int kGroupStrips = 12;            // most strips decoded at once
constexpr int kStripBytes = kChunk * kTileBytes;

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
                         int64_t steps, const Sums* in, const Sums* out, bool add) {
  memory_barrier();
  if (add) {
    _tile_loadd(0, in[0].at, in[0].stride);
    _tile_loadd(1, in[1].at, in[1].stride);
    _tile_loadd(2, in[2].at, in[2].stride);
    _tile_loadd(3, in[3].at, in[3].stride);
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
  _tile_stored(0, out[0].at, out[0].stride);
  _tile_stored(1, out[1].at, out[1].stride);
  _tile_stored(2, out[2].at, out[2].stride);
  _tile_stored(3, out[3].at, out[3].stride);
  memory_barrier();
}

static void multiply_1x2(const uint8_t* a, const uint8_t* b0, const uint8_t* b1, int64_t steps,
                         const Sums* in, const Sums* out, bool add) {
  memory_barrier();
  if (add) {
    _tile_loadd(0, in[0].at, in[0].stride);
    _tile_loadd(1, in[1].at, in[1].stride);
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
  _tile_stored(0, out[0].at, out[0].stride);
  _tile_stored(1, out[1].at, out[1].stride);
  memory_barrier();
}

// What one task works on: B tiles of strips [strip, strip + count) and inputs of `tiles` tiles.
struct Group {
  int64_t strip, count, first_tile, tiles;
  const uint8_t* b;
  float* sums;  // [kGroupStrips / 2][4][256], C tiles of the current 32 rows
};

static void copy_tile(float* to, int64_t to_stride, const float* from, int64_t from_stride,
                      int64_t rows) {
  for (int64_t r = 0; r < rows; ++r)
    _mm512_storeu_ps(to + r * to_stride, _mm512_loadu_ps(from + r * from_stride));
}

// 32 rows from tile row `i`, or 16 if it is the last one, times a group.
static void multiply_rows(const GemmLargeParams& p, const Group& g, int64_t i) {
  const int64_t row_bytes = p.k * kGemmLargeRowBytes * kTileDim;
  const int64_t stride = p.y_stride * static_cast<int64_t>(sizeof(float));
  const int64_t rows = p.m - i * kTileDim;  // from the first of the two tiles
  const int tiles_down = rows > kTileDim ? 2 : 1;
  const int64_t tail = rows < tiles_down * kTileDim ? rows % kTileDim : 0;
  const uint8_t* a =
      static_cast<const uint8_t*>(p.workspace) + i * row_bytes + g.first_tile * kTileBytes;
  const int64_t panels = (g.tiles + kPanel - 1) / kPanel;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t first = g.tiles * panel / panels;
    const int64_t steps = g.tiles * (panel + 1) / panels - first;
    for (int64_t pair = 0; pair < g.count / 2; ++pair) {
      Sums y[4], kept[4];
      for (int t = 0; t < 4; ++t) {
        float* at =
            p.y + (i + t / 2) * kTileDim * p.y_stride + (g.strip + 2 * pair + t % 2) * kTileDim;
        y[t] = {at, stride};
        kept[t] = {g.sums + (pair * 4 + t) * kTileNumel, 64};
      }
      const int last = 2 * (tiles_down - 1);
      Sums in[4], out[4];
      for (int t = 0; t < 4; ++t) {
        const bool whole = !(tail && t >= last);
        in[t] = panel == 0 && whole ? y[t] : kept[t];
        out[t] = panel + 1 == panels && whole ? y[t] : kept[t];
      }
      const bool add = panel > 0 || g.first_tile > 0;
      if (tail && panel == 0 && add) {
        for (int t = last; t < last + 2; ++t)
          copy_tile(kept[t].at, kTileDim, y[t].at, p.y_stride, tail);
      }
      const uint8_t* a0 = a + first * kTileBytes;
      const uint8_t* b0 = g.b + 2 * pair * kStripBytes + first * kTileBytes;
      if (tiles_down == 2)
        multiply_2x2(a0, a0 + row_bytes, b0, b0 + kStripBytes, steps, in, out, add);
      else
        multiply_1x2(a0, b0, b0 + kStripBytes, steps, in, out, add);
      if (tail && panel + 1 == panels) {
        for (int t = last; t < last + 2; ++t)
          copy_tile(y[t].at, p.y_stride, kept[t].at, kTileDim, tail);
      }
    }
  }
}

}  // namespace

// Groups of 16 rows to A tiles; rows past m are zero.
void gemm_large_inputs(const GemmLargeParams& p, int64_t begin, int64_t end) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  2,  4,  6,  1,  3,  5,  7,  8,  10, 12,
                                                      14, 9,  11, 13, 15, 16, 18, 20, 22, 17, 19,
                                                      21, 23, 24, 26, 28, 30, 25, 27, 29, 31};
  const __m512i index = _mm512_load_si512(kOrder);
  for (int64_t group = begin; group < end; ++group) {
    uint8_t* out = static_cast<uint8_t*>(p.workspace) + group * kTileDim * p.k * kGemmLargeRowBytes;
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
  alignas(64) uint8_t b[kGroupStrips * kStripBytes];
  alignas(64) float sums[kGroupStrips / 2 * 4 * kTileNumel];
  const DecodeStrip decode = kDecode[static_cast<int>(p.codebook)][p.bits - 1];
  const int64_t tiles = p.k / kTileInputs, chunks = (tiles + kChunk - 1) / kChunk;
  for (int64_t strip = begin; strip < end; strip += kGroupStrips) {
    Group g{strip, end - strip < kGroupStrips ? end - strip : kGroupStrips, 0, 0, b, sums};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      g.first_tile = tiles * chunk / chunks;
      g.tiles = tiles * (chunk + 1) / chunks - g.first_tile;
      for (int64_t s = 0; s < g.count; ++s) {
        const int64_t at = (strip + s) * (p.k / kTileDim) + 2 * g.first_tile;
        decode(p.planes + at * 16 * p.bits, 2 * g.tiles, b + s * kStripBytes);
      }
      for (int64_t i = 0; i * kTileDim < p.m; i += 2) multiply_rows(p, g, i);
    }
  }
  _tile_release();
}

}  // namespace exl3::amx
