// Inner product of mul1 weights with some rows of activations in AMX tiles of bytes.
//
//   sum_i q_i (b0 + b1 + b2 + b3)_i
//
// One 16 x 16 tile of weights is one B tile: its 256 products of four bytes each, straight from
// registers. State register e holds lanes t: input 2(t%4) + {0,1,8,9}[e%4], column t/4 + 8(e/4);
// two neighbouring lanes are one 32-bit element: one column, inputs j = 0, 1 or j = 2, 3 of e.
// Gathering one kind from the registers of e and e + 4 puts 16 columns in order, then
//   B row    4e       4e + 1   4e + 2    4e + 3
//            lo, 0 1  lo, 2 3  hi, 0 1   hi, 2 3        (halves of the product, inputs j)
// An A row is the 16 inputs of one row of x to match, 64 bytes: of each e the inputs j = 0..3, each
// twice, twice over. More than 4 bits take two A tiles, high and low bytes of 16-bit activations.
//
// Work: at 4 bits 47 vector instructions per 256 weights for decoding (26 cycles) and 16 stores; 16
// cycles of the tile unit for 16 rows and plane, and two tile loads. Measured 51 cycles at 2 rows,
// 65 at 16, where the loads of A tiles come from the second-level cache; 8 rows on words take 84.
#include "cpu/amx/linear.h"
#include "cpu/amx/tiles.h"
#include "cpu/avx512/decode_inl.h"
#include "cpu/avx512/sums.h"

namespace exl3::amx {
namespace {

constexpr int kTilesPerBlock = kHadamardDim / kTileDim;

template <int E>
EXL3_STATIC void store_rows(const __m512i* states, uint8_t* out) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  const __m512i j01 = _mm512_permutex2var_epi32(states[E], even, states[E + 4]);
  const __m512i j23 = _mm512_permutex2var_epi32(states[E], odd, states[E + 4]);
  const avx512::Product a = avx512::multiply<kMul1Mul>(j01), b = avx512::multiply<kMul1Mul>(j23);
  _mm512_store_si512(out + 256 * E, a.lo);
  _mm512_store_si512(out + 256 * E + 64, b.lo);
  _mm512_store_si512(out + 256 * E + 128, a.hi);
  _mm512_store_si512(out + 256 * E + 192, b.hi);
}

template <int K>
EXL3_STATIC void decode_tile(const uint16_t* tile, uint8_t* out) {
  avx512::prefetch_ahead<K>(tile);
  __m512i states[8];
  avx512::tile_states<K>(tile, states);
  store_rows<0>(states, out);
  store_rows<1>(states, out);
  store_rows<2>(states, out);
  store_rows<3>(states, out);
}

// C tiles 0 and 1, A tiles 4 and 5, B tile 6: one product for each plane of A.
template <int kPlanes>
EXL3_STATIC void zero_sums() {
  _tile_zero(0);
  if constexpr (kPlanes == 2) _tile_zero(1);
}

template <int kPlanes>
EXL3_STATIC void multiply_tiles(const uint8_t* b, const uint8_t* a) {
  _tile_loadd(6, b, 64);
  _tile_loadd(4, a, 64);
  _tile_dpbsud(0, 4, 6);
  if constexpr (kPlanes == 2) {
    _tile_loadd(5, a + kTileBytes, 64);
    _tile_dpbsud(1, 5, 6);
  }
}

template <int kPlanes>
EXL3_STATIC void store_sums(int32_t* out) {
  _tile_stored(0, out, 64);
  if constexpr (kPlanes == 2) _tile_stored(1, out + 256, 64);
}

// totals[row] += a block. sums: [plane] of 16 x 16.
template <int kPlanes>
EXL3_STATIC void add_sums(const int32_t* sums, const LinearBlockMeta* meta, int64_t blocks,
                          int rows, __m512* totals) {
  for (int r = 0; r < rows; ++r, meta += blocks) {
    const int32_t* at = sums + 16 * r;
    __m512i sum = _mm512_load_si512(at);
    if constexpr (kPlanes == 2) {
      sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), _mm512_load_si512(at + 256));
    }
    sum = _mm512_add_epi32(sum, _mm512_set1_epi32(meta->init));
    totals[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(meta->scale), totals[r]);
  }
}

// All strips, up to 16 rows from row0. Strips are one stream of tiles; products go
// round a ring and are loaded kAhead tiles after their stores, because a tile load that finds its
// bytes still on the way to the cache takes 84 cycles, not 9.
template <int K>
void strip_rows(const LinearStrips& s, int64_t row0) {
  constexpr int kPlanes = K <= 4 ? 1 : 2;
  constexpr int kAhead = 6, kRing = 16;
  alignas(64) uint8_t products[kRing][kTileBytes];
  alignas(64) int32_t sums[kPlanes * 256];
  __m512 totals[16];
  const int64_t tiles = s.k / kTileDim, blocks = s.k / kHadamardDim;
  const int rows = static_cast<int>(s.m - row0 < 16 ? s.m - row0 : 16);
  const LinearBlockMeta* meta = s.meta + row0 * blocks;
  const uint8_t* a =
      reinterpret_cast<const uint8_t*>(s.q) + row0 / 16 * tiles * kPlanes * kTileBytes;
  const uint16_t* ahead = s.planes + s.begin * tiles * 16 * K;
  const uint16_t* end = s.planes + s.end * tiles * 16 * K;
  int slot = 0;  // in the ring, of the tile to multiply
  for (; slot < kAhead; ++slot, ahead += 16 * K) decode_tile<K>(ahead, products[slot]);
  slot = 0;
  zero_sums<kPlanes>();
  for (int64_t strip = s.begin; strip < s.end; ++strip) {
    for (int r = 0; r < rows; ++r) totals[r] = _mm512_setzero_ps();
    for (int64_t i = 0; i < tiles; ++i, slot = (slot + 1) % kRing) {
      if (ahead != end) {
        decode_tile<K>(ahead, products[(slot + kAhead) % kRing]);
        ahead += 16 * K;
      }
      memory_barrier();
      multiply_tiles<kPlanes>(products[slot], a + i * kPlanes * kTileBytes);
      if (i % kTilesPerBlock != kTilesPerBlock - 1) continue;
      store_sums<kPlanes>(sums);
      zero_sums<kPlanes>();
      memory_barrier();
      add_sums<kPlanes>(sums, meta + i / kTilesPerBlock, blocks, rows, totals);
    }
    for (int r = 0; r < rows; ++r) {
      const float base = avx512::row_base(meta + r * blocks, blocks);
      _mm512_storeu_ps(inner_at(s, strip, row0 + r),
                       _mm512_add_ps(totals[r], _mm512_set1_ps(base)));
    }
  }
}

template <int K>
void all_rows(const LinearStrips& s) {
  for (int64_t row = 0; row < s.m; row += 16) strip_rows<K>(s, row);
}

constexpr void (*kStrips[8])(const LinearStrips&) = {all_rows<1>, all_rows<2>, all_rows<3>,
                                                     all_rows<4>, all_rows<5>, all_rows<6>,
                                                     all_rows<7>, all_rows<8>};

}  // namespace

void linear_tiles(const LinearStrips& s) {
  configure_tiles();
  kStrips[s.bits - 1](s);
  _tile_release();
}

}  // namespace exl3::amx
