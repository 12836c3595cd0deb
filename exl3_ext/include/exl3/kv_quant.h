// Format of a quantised K or V row, the same on every device. See doc/kernels/kv_quant.md.
//
// The dims of a head fall into blocks of 32; a last block may be shorter. A block is rotated by a
// normalised Walsh-Hadamard matrix (a short one in pieces of the largest power of two that divides
// its size), then value t is
//   (code_t - (2^(bits-1) - 0.5)) * scale / 2^(bits-1),   code_t in [0, 2^bits)
// A row is blocks * bits words and blocks scales (float16). The binary digits of `bits` are the
// widths of the planes of a block, widest first; the first holds the low bits of the codes. A plane
// of width w is w words. With h = t / 16 and p = t % 16, code t's part of it is the w bits of
// word p / (16/w) from bit 16 h + w (p % (16/w)) on: a word holds values p in its low half and
// values 16 + p in its high half, so two codes come out of it by one shift and one mask.
#pragma once
#include "exl3/types.h"

namespace exl3 {

constexpr int kQuantBlock = 32;
constexpr int kQuantMinBits = 2;
constexpr int kQuantMaxBits = 8;

// Rows of a quantised cache; bits 0: the cache is plain float16.
struct QuantRows {
  const uint32_t* words;    // [rows, blocks * bits]
  const half_bits* scales;  // [rows, blocks]
  int bits;
};
struct QuantRowsOut {
  uint32_t* words;
  half_bits* scales;
  int bits;
};

static constexpr int quant_blocks(int dim) { return (dim + kQuantBlock - 1) / kQuantBlock; }

// Values of block `block`, and the size of its rotation.
static constexpr int quant_block_size(int dim, int block) {
  const int left = dim - block * kQuantBlock;
  return left < kQuantBlock ? left : kQuantBlock;
}
static constexpr int quant_rotation(int size) { return size & -size; }

// 1 / sqrt(size), size a power of two up to 32.
static constexpr float quant_rotation_norm(int size) {
  return size == 32   ? 0.17677669529663689f
         : size == 16 ? 0.25f
         : size == 8  ? 0.35355339059327379f
         : size == 4  ? 0.5f
         : size == 2  ? 0.70710678118654757f
                      : 1.0f;
}

// The scale is the one of these candidates that leaves the least squared error: the greatest
// magnitude of the block then lies at level 2^(bits-1) - 0.5 + shift of 2^(bits-1).
constexpr int kQuantCandidates = 4;
static constexpr float quant_candidate(int bits, int i) {
  const float half = static_cast<float>(1 << (bits - 1));
  return half / (half - 0.5f + 0.4f * static_cast<float>(i));
}

}  // namespace exl3
