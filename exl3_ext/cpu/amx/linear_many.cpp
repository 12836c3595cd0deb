// Inner product of many rows of activations with weights as 16-bit integers, in AMX tiles of bytes;
// every codebook. The sums are exact, so a row gets the bits that every other kernel gives it.
//
// A weight v = 256 vh + vl and, where it has more than 8 bits, an activation q = 256 qh + ql, with
// vl unsigned and the others signed. Of a 128-block
//   sum q v = 65536 sum qh vh + 256 (sum qh vl + sum ql vh) + sum ql vl      modulo 2^32
// A tile of A is 16 rows of 64 inputs, 1 KiB; of B 16 groups of four inputs for 16 columns; of C
// 16 x 16 sums. State register e of a weight tile holds four inputs 2j + {0,1,8,9}[e % 4] of eight
// columns, e + 4 of the other eight: packing the two to bytes gives row e of B, with the columns in
// an order (`kColumns`) that is undone when a row's total is stored.
//
// A task decodes a panel of one strip into the first-level cache and multiplies it with all rows.
// Its units are 16 rows and one block. While the tiles of one unit are multiplied, those of the
// unit before wait to be stored and the sums of the one before that become float32 and are added to
// the totals of their rows, which stay in registers over a panel.
//
// Work a unit: four products of 16 cycles (eight with two planes), and 64 vector instructions,
// which hardly overlap with them. Measured 33 ns on a Xeon with AMX; 512 rows, 576 -> 2 x 1536, 4
// bits: about as long as bfloat16 tiles of decoded weights took.
#include "cpu/amx/linear.h"
#include "cpu/amx/tiles.h"
#include "cpu/avx512/sums.h"
#include "cpu/avx512/values.h"

namespace exl3::amx {
namespace {

constexpr int kBlockTiles = kHadamardDim / kTileDim;  // weight tiles of a block
constexpr int kSteps = kHadamardDim / 64;             // A tiles of a block
constexpr int kPanel = 6;                             // most blocks decoded at once: 24 KiB
constexpr int kBlockBytes = 2 * kSteps * kTileBytes;  // of B: [step][high, low]

template <Codebook C, int K>
void decode_panel(const uint16_t* tile, int64_t blocks, uint8_t* out) {
  const __m512i low = _mm512_set1_epi16(255);
  const __m512i centre = _mm512_set1_epi16(linear_scale(C).centre);
  for (int64_t i = 0; i < blocks * kBlockTiles; ++i, tile += 16 * K) {
    avx512::prefetch_ahead<K>(tile);
    __m512i states[8];
    avx512::tile_states<K>(tile, states);
    uint8_t* at = out + i / 4 * 2 * kTileBytes + i % 4 * 256;
#pragma GCC unroll 4
    for (int e = 0; e < 4; ++e, at += 64) {
      const __m512i a = _mm512_sub_epi16(avx512::weight_values<C>(states[e]), centre);
      const __m512i b = _mm512_sub_epi16(avx512::weight_values<C>(states[e + 4]), centre);
      const __m512i high = _mm512_packs_epi16(_mm512_srai_epi16(a, 8), _mm512_srai_epi16(b, 8));
      _mm512_store_si512(at, high);
      _mm512_store_si512(at + kTileBytes,
                         _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low)));
    }
  }
}

using DecodePanel = void (*)(const uint16_t*, int64_t, uint8_t*);
#define EXL3_DECODERS(C)                                                           \
  {decode_panel<C, 1>, decode_panel<C, 2>, decode_panel<C, 3>, decode_panel<C, 4>, \
   decode_panel<C, 5>, decode_panel<C, 6>, decode_panel<C, 7>, decode_panel<C, 8>}
constexpr DecodePanel kDecode[kCodebooks][8] = {
    EXL3_DECODERS(Codebook::k3inst), EXL3_DECODERS(Codebook::kMcg), EXL3_DECODERS(Codebook::kMul1)};

// Sums of a unit, tiles of 16 x 16: high and low, or qh vh, mixed and ql vl.
struct alignas(64) Sums {
  int32_t c[3][256];
};

// C tiles of a unit: three from 3 * kSet on. A: tile 6, B: tile 7.
template <int kSet, int kPlanes>
EXL3_STATIC void zero_tiles() {
  if constexpr (kSet == 0) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kPlanes == 2) _tile_zero(2);
  } else {
    _tile_zero(3);
    _tile_zero(4);
    if constexpr (kPlanes == 2) _tile_zero(5);
  }
}

template <int kSet, int kPlanes>
EXL3_STATIC void store_tiles(Sums* to) {
  if constexpr (kSet == 0) {
    _tile_stored(0, to->c[0], 64);
    _tile_stored(1, to->c[1], 64);
    if constexpr (kPlanes == 2) _tile_stored(2, to->c[2], 64);
  } else {
    _tile_stored(3, to->c[0], 64);
    _tile_stored(4, to->c[1], 64);
    if constexpr (kPlanes == 2) _tile_stored(5, to->c[2], 64);
  }
}

// The loaded tile of A times high or low bytes of v, which are loaded, into C tile 3 * kSet + kC.
template <int kSet, int kC>
EXL3_STATIC void multiply_high() {
  if constexpr (3 * kSet + kC == 0) _tile_dpbssd(0, 6, 7);
  if constexpr (3 * kSet + kC == 1) _tile_dpbssd(1, 6, 7);
  if constexpr (3 * kSet + kC == 3) _tile_dpbssd(3, 6, 7);
  if constexpr (3 * kSet + kC == 4) _tile_dpbssd(4, 6, 7);
}

template <int kSet, int kC>
EXL3_STATIC void multiply_low() {
  if constexpr (3 * kSet + kC == 1) _tile_dpbsud(1, 6, 7);
  if constexpr (3 * kSet + kC == 2) _tile_dpbsud(2, 6, 7);
  if constexpr (3 * kSet + kC == 4) _tile_dpbsud(4, 6, 7);
  if constexpr (3 * kSet + kC == 5) _tile_dpbsud(5, 6, 7);
}

// 64 inputs, in two halves.
template <int kSet>
EXL3_STATIC void first_half(const uint8_t* a, const uint8_t* b) {
  _tile_loadd(6, a, 64);
  _tile_loadd(7, b, 64);
  multiply_high<kSet, 0>();
}

template <int kSet, int kPlanes>
EXL3_STATIC void second_half(const uint8_t* a, const uint8_t* b) {
  _tile_loadd(7, b + kTileBytes, 64);
  multiply_low<kSet, 1>();
  if constexpr (kPlanes == 2) {
    _tile_loadd(6, a + kTileBytes, 64);
    multiply_low<kSet, 2>();
    _tile_loadd(7, b, 64);
    multiply_high<kSet, 1>();
  }
}

// Totals of 16 rows in registers, and what is added to them next.
struct Totals {
  __m512 row[16];
};

template <int kPlanes, int kFirst>
EXL3_STATIC void add_four(const Sums& sums, const float* scale, Totals* totals) {
#pragma GCC unroll 4
  for (int r = kFirst; r < kFirst + 4; ++r) {
    __m512i sum = _mm512_slli_epi32(_mm512_load_si512(sums.c[0] + 16 * r), 8);
    sum = _mm512_add_epi32(sum, _mm512_load_si512(sums.c[1] + 16 * r));
    if constexpr (kPlanes == 2) {
      sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), _mm512_load_si512(sums.c[2] + 16 * r));
    }
    totals->row[r] =
        _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scale[r]), totals->row[r]);
  }
}

// Column c of a row's totals is lane columns()[c].
EXL3_STATIC __m512i columns() {
  return _mm512_set_epi32(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0);
}

struct Panel {
  const LinearStrips& s;
  int64_t strip, block, blocks;  // of inputs
  const uint8_t* b;
  const float* base;  // of every row
};

EXL3_STATIC void load_totals(const Panel& p, int64_t row, Totals* totals) {
  const float* from = inner_at(p.s, p.strip, row);
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) {
    totals->row[r] =
        p.block && row + r < p.s.m ? _mm512_loadu_ps(from + 16 * r) : _mm512_setzero_ps();
  }
}

EXL3_STATIC void store_totals(const Panel& p, int64_t row, const Totals& totals) {
  float* to = inner_at(p.s, p.strip, row);
  const bool last = p.block + p.blocks == p.s.k / kHadamardDim;
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) {
    __m512 total = totals.row[r];
    if (last) {
      total =
          _mm512_add_ps(_mm512_permutexvar_ps(columns(), total), _mm512_set1_ps(p.base[row + r]));
    }
    if (row + r < p.s.m) _mm512_storeu_ps(to + 16 * r, total);
  }
}

// A unit to multiply, or none, and one whose sums to add, or none.
struct Step {
  const uint8_t* a;  // null: none
  const uint8_t* b;
  const Sums* sums;  // null: none
  const float* scale;
};

template <int kSet, int kPlanes>
EXL3_STATIC void run_step(const Step& t, Sums* before, Totals* totals) {
  constexpr int kNextA = kPlanes * kTileBytes, kNextB = 2 * kTileBytes;
  memory_barrier();
  if (t.a) {
    zero_tiles<kSet, kPlanes>();
    first_half<kSet>(t.a, t.b);
  }
  if (t.sums) add_four<kPlanes, 0>(*t.sums, t.scale, totals);
  memory_barrier();
  if (t.a) second_half<kSet, kPlanes>(t.a, t.b);
  if (t.sums) add_four<kPlanes, 4>(*t.sums, t.scale, totals);
  memory_barrier();
  if (t.a) first_half<kSet>(t.a + kNextA, t.b + kNextB);
  if (t.sums) add_four<kPlanes, 8>(*t.sums, t.scale, totals);
  memory_barrier();
  if (t.a) second_half<kSet, kPlanes>(t.a + kNextA, t.b + kNextB);
  if (t.sums) add_four<kPlanes, 12>(*t.sums, t.scale, totals);
  memory_barrier();
  store_tiles<1 - kSet, kPlanes>(before);
  memory_barrier();
}

// All rows times one panel.
template <int kPlanes>
void panel_rows(const Panel& p) {
  const LinearStrips& s = p.s;
  const int64_t blocks = s.k / kHadamardDim, block_bytes = kSteps * kPlanes * kTileBytes;
  const int64_t units = (s.m + 15) / 16 * p.blocks;
  const auto* meta = reinterpret_cast<const LinearTileMeta*>(s.meta);
  const uint8_t* a = reinterpret_cast<const uint8_t*>(s.q) + p.block * block_bytes;
  Sums sums[2];
  Totals totals;
  int64_t tile = 0, block = 0;          // to multiply next
  int64_t old_tile = 0, old_block = 0;  // to add next
  for (int64_t unit = 0; unit < units + 2; ++unit) {
    Step t{};
    if (unit < units) {
      t.a = a + (tile * blocks + block) * block_bytes;
      t.b = p.b + block * kBlockBytes;
      if (++block == p.blocks) block = 0, ++tile;
    }
    if (unit >= 2) {
      t.sums = sums + (unit & 1);
      t.scale = meta[old_tile * blocks + p.block + old_block].scale;
      if (old_block == 0) load_totals(p, 16 * old_tile, &totals);
    }
    if (unit & 1)
      run_step<1, kPlanes>(t, sums, &totals);
    else
      run_step<0, kPlanes>(t, sums + 1, &totals);
    if (unit >= 2 && ++old_block == p.blocks) {
      store_totals(p, 16 * old_tile, totals);
      old_block = 0, ++old_tile;
    }
  }
}

// What the blocks of each row add to every output, in their order.
void row_bases(const LinearStrips& s, float* base) {
  const int64_t blocks = s.k / kHadamardDim;
  const auto* meta = reinterpret_cast<const LinearTileMeta*>(s.meta);
  for (int64_t row = 0; row < s.m; row += 16, base += 16) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < blocks; ++i, ++meta)
      sum = _mm512_add_ps(sum, _mm512_loadu_ps(meta->offset));
    _mm512_storeu_ps(base, sum);
  }
}

}  // namespace

void linear_many(const LinearStrips& s) {
  configure_tiles();
  const int64_t blocks = s.k / kHadamardDim, panels = (blocks + kPanel - 1) / kPanel;
  const DecodePanel decode = kDecode[static_cast<int>(s.codebook)][s.bits - 1];
  alignas(64) uint8_t b[kPanel * kBlockBytes];
  float base[kLinearRows];
  row_bases(s, base);
  for (int64_t strip = s.begin; strip < s.end; ++strip) {
    for (int64_t i = 0; i < panels; ++i) {
      Panel p{s, strip, blocks * i / panels, 0, b, base};
      p.blocks = blocks * (i + 1) / panels - p.block;
      const int64_t tile = (strip * blocks + p.block) * kBlockTiles;
      decode(s.planes + tile * 16 * s.bits, p.blocks, b);
      if (s.q_planes == 2)
        panel_rows<2>(p);
      else
        panel_rows<1>(p);
    }
  }
  _tile_release();
}

}  // namespace exl3::amx
