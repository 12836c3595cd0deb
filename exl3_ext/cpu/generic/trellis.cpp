// Trellis packing, decoding and the lane-plane layout, one tile at a time.
#include "cpu/generic/trellis.h"

#include <cstring>

#include "cpu/generic/codebook.h"
#include "exl3/codebook.h"

namespace exl3::generic {
namespace {

constexpr int kLanes = 32;
constexpr int kMaxTileBytes = kLanes * 8;

// Stored words are halves of little-endian uint32 words whose bits run from the most significant
// down, so stream byte i is stored byte i ^ 3.
struct PlaneOrders {
  uint8_t stored[8][kMaxTileBytes];
  PlaneOrders() {
    for (int bits = 1; bits <= 8; ++bits) {
      const int paired = bits / 2 * 2;  // bytes of a lane that are in planes of uint16
      for (int at = 0; at < kLanes * bits; ++at) {
        int lane, byte;
        if (at < kLanes * paired) {
          lane = at % 64 / 2;
          byte = at / 64 * 2 + 1 - at % 2;  // the first stream byte is the high one
        } else {
          lane = at - kLanes * paired;
          byte = bits - 1;
        }
        stored[bits - 1][at] = static_cast<uint8_t>((lane * bits + byte) ^ 3);
      }
    }
  }
};

}  // namespace

const uint8_t* plane_order(int bits) {
  static const PlaneOrders orders;
  return orders.stored[bits - 1];
}

void trellis_pack(const TrellisPackParams& p, int64_t begin, int64_t end) {
  const int words = 16 * p.bits;
  const uint32_t mask = (1u << p.bits) - 1;
  for (int64_t tile = begin; tile < end; ++tile) {
    const int32_t* states = p.states + tile * kTileNumel;
    uint16_t* out = p.trellis + tile * words;
    uint64_t window = 0;
    int held = 0, word = 0;
    for (int i = 0; i < kTileNumel; ++i) {
      window = (window << p.bits) | (static_cast<uint32_t>(states[i]) & mask);
      held += p.bits;
      if (held >= 16) {
        held -= 16;
        out[stored_word(word++)] = static_cast<uint16_t>(window >> held);
      }
    }
  }
}

void trellis_unpack(const TrellisPackParams& p, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) {
    const uint16_t* words = p.trellis + tile * 16 * p.bits;
    int32_t* states = p.states + tile * kTileNumel;
    for (int i = 0; i < kTileNumel; ++i) {
      states[i] = static_cast<int32_t>(tile_state(words, p.bits, i));
    }
  }
}

// Rows [begin, end) of tiles, counted over the batch.
void trellis_decode(const TrellisDecodeParams& p, int64_t begin, int64_t end) {
  const half_bits* values = codebook_values(p.codebook);
  const int64_t columns = p.n / kTileDim;
  for (int64_t row = begin; row < end; ++row) {
    half_bits* out = p.w + row * kTileDim * p.n;
    for (int64_t j = 0; j < columns; ++j) {
      const uint16_t* words = p.trellis + (row * columns + j) * 16 * p.bits;
      for (int i = 0; i < kTileNumel; ++i) {
        out[tile_row(i) * p.n + j * kTileDim + tile_col(i)] = values[tile_state(words, p.bits, i)];
      }
    }
  }
}

// Strips [begin, end), counted over the batch.
void trellis_prepare(const TrellisPlanesParams& p, int64_t begin, int64_t end) {
  const uint8_t* order = plane_order(p.bits);
  const int bytes = kLanes * p.bits;
  const auto* from = reinterpret_cast<const uint8_t*>(p.from);
  auto* to = reinterpret_cast<uint8_t*>(p.to);
  for (int64_t strip = begin; strip < end; ++strip) {
    const int64_t b = strip / p.n_tiles, j = strip % p.n_tiles;
    for (int64_t i = 0; i < p.k_tiles; ++i) {
      const uint8_t* in = from + ((b * p.k_tiles + i) * p.n_tiles + j) * bytes;
      uint8_t* out = to + (strip * p.k_tiles + i) * bytes;
      for (int at = 0; at < bytes; ++at) out[at] = in[order[at]];
    }
  }
}

void trellis_restore(const TrellisPlanesParams& p, int64_t begin, int64_t end) {
  const uint8_t* order = plane_order(p.bits);
  const int bytes = kLanes * p.bits;
  const auto* from = reinterpret_cast<const uint8_t*>(p.from);
  auto* to = reinterpret_cast<uint8_t*>(p.to);
  for (int64_t strip = begin; strip < end; ++strip) {
    const int64_t b = strip / p.n_tiles, j = strip % p.n_tiles;
    for (int64_t i = 0; i < p.k_tiles; ++i) {
      const uint8_t* in = from + (strip * p.k_tiles + i) * bytes;
      uint8_t* out = to + ((b * p.k_tiles + i) * p.n_tiles + j) * bytes;
      for (int at = 0; at < bytes; ++at) out[order[at]] = in[at];
    }
  }
}

void plane_states(const uint16_t* tile, int bits, uint16_t* states) {
  const int bytes = kLanes * bits, pairs = bits / 2;
  uint8_t stream[kMaxTileBytes + 2];  // the last two bytes of the circle, then all of it
  uint8_t* lane = stream + 2;
  for (int t = 0; t < kLanes; ++t) {
    for (int w = 0; w < pairs; ++w) {
      *lane++ = static_cast<uint8_t>(tile[w * kLanes + t] >> 8);
      *lane++ = static_cast<uint8_t>(tile[w * kLanes + t]);
    }
    if (bits % 2) *lane++ = reinterpret_cast<const uint8_t*>(tile + pairs * kLanes)[t];
  }
  std::memcpy(stream, stream + bytes, 2);
  uint32_t window = static_cast<uint32_t>(stream[0]) << 8 | stream[1];
  const uint8_t* next = stream + 2;
  int held = 0;  // stream bits in the window past the 16 of the last state
  for (int p = 0; p < kTileNumel; ++p) {
    if (held < bits) {
      window = window << 8 | *next++;
      held += 8;
    }
    held -= bits;
    states[p] = static_cast<uint16_t>(window >> held);
  }
}

}  // namespace exl3::generic
