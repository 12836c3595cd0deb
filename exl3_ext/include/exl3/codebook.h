// Codebook and bit-window arithmetic (format page, section 2): one place for host, device and
// tests. Everything is modulo 2^32.
#pragma once
#include <cstdint>

#include "exl3/types.h"

#if defined(__CUDACC__)
#define EXL3_HD __host__ __device__
#else
#define EXL3_HD
#endif

namespace exl3 {

constexpr uint32_t k3instMul = 89226354u;
constexpr uint32_t k3instAdd = 64248484u;
constexpr uint32_t kMcgMul = 0xCBAC1FEDu;
constexpr uint32_t kMul1Mul = 0x83DCD12Du;
constexpr uint32_t kHalfPairMask = 0x8FFF8FFFu;
constexpr uint32_t kHalfPairXor = 0x3B603B60u;
constexpr uint16_t kMul1ScaleBits = 0x1EEE;   // float16 a, about 1/147.7
constexpr uint16_t kMul1OffsetBits = 0xC931;  // float16 c, about -10.39
constexpr int kMul1Bias = 1024;

// 3inst, mcg: two float16 values in one word; the weight is their float16 sum.
EXL3_HD static constexpr uint32_t half_pair(Codebook cb, uint32_t state) {
  const uint32_t x = cb == Codebook::k3inst ? state * k3instMul + k3instAdd : state * kMcgMul;
  return (x & kHalfPairMask) ^ kHalfPairXor;
}

// mul1: the sum of the four bytes, 0..1020; the weight is fma(1024 + sum, a, c) in float16.
EXL3_HD static constexpr uint32_t mul1_byte_sum(uint32_t state) {
  const uint32_t x = state * kMul1Mul;
  return (x & 255u) + ((x >> 8) & 255u) + ((x >> 16) & 255u) + (x >> 24);
}

// Position p = 8t + e of a tile -> row and column inside the 16x16 tile.
//   e mod 4:  0   1   2   3        e div 4:  0    1
//   row     2q  2q+1 2q+8 2q+9     column   t/4  t/4 + 8      (q = t mod 4)
EXL3_HD static constexpr int tile_row(int p) {
  return 2 * ((p >> 3) & 3) + (p & 1) + 8 * ((p >> 1) & 1);
}
EXL3_HD static constexpr int tile_col(int p) { return (p >> 5) + 8 * ((p >> 2) & 1); }

// Stored int16 words of a tile are the halves of little-endian uint32 words, high half first in the
// stream: stream word i is stored word i ^ 1.
EXL3_HD static constexpr int stored_word(int stream_word) { return stream_word ^ 1; }

// 16-bit state of position p: the 16 bits of the circular stream that end before bit (p+1)*bits.
// `words` are the tile's 16*bits words as stored.
EXL3_HD static constexpr uint32_t tile_state(const uint16_t* words, int bits, int p) {
  const int total = kTileNumel * bits;
  int start = (p + 1) * bits - 16;
  if (start < 0) start += total;
  const int word = start >> 4;
  const int next = word + 1 == 16 * bits ? 0 : word + 1;
  const uint32_t pair =
      (static_cast<uint32_t>(words[stored_word(word)]) << 16) | words[stored_word(next)];
  return (pair >> (16 - (start & 15))) & 0xFFFFu;
}

}  // namespace exl3
