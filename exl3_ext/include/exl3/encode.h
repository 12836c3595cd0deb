#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

constexpr int kStates = 65536;
constexpr int kEncodeLanes = 16;      // nodes in a row of the search table
constexpr int kEncodeTaggedBits = 4;  // up to this rate costs carry the chosen predecessor
constexpr int kEncodeCoarseBits = 2;  // up to this rate they are rounded down to a multiple of 256

// The walk (cpu/encode.cpp). Results depend on these numbers, so all backends share them.
// Costs are at most the cap: base + edge cannot overflow, and a coarse cost fits 16 bits.
constexpr int32_t encode_cap(int bits) {
  return bits <= kEncodeCoarseBits ? 0x7FFF00 : 800'000'000;
}
constexpr int32_t kEncodeShift = 500'000'000;  // at most this is taken off in one step
// What a step keeps of a tagged cost; the tag comes below it.
constexpr int32_t encode_keep(int bits) {
  return bits <= kEncodeCoarseBits ? -256 : bits <= kEncodeTaggedBits ? -(1 << bits) : -1;
}
// What a step takes off all costs, by the least of them before it.
constexpr int32_t encode_shift(int bits, int32_t low) {
  const int32_t kept = low & encode_keep(bits);
  return kept < kEncodeShift ? kept : kEncodeShift;
}
// What gain and weight are multiplied by: edges of tagged rates are multiples of 2^bits.
constexpr int encode_unit(int bits) { return bits <= kEncodeCoarseBits ? 1 : 1 << bits; }
constexpr int kEncodeRing = 512;  // steps that can be traced back, a power of two

// Steps beyond a lap before the first trace, and between traces; after `most` steps or more the lap
// is forced. By bit rate.
struct EncodePatience {
  int first, more, most;
};
constexpr EncodePatience kEncodePatience[9] = {{0, 0, 0},     {128, 64, 600}, {96, 64, 600},
                                               {96, 64, 448}, {64, 64, 448},  {48, 32, 448},
                                               {32, 32, 448}, {32, 32, 448},  {32, 32, 448}};

// Trellis search, one tile at a time: the circular state sequence nearest to the tile.
// Costs are integers, so that every instruction level finds the same path. An edge costs
//   bits <= 4:  (table[s][0] * gain + table[s][1] * y) * encode_unit(bits)
//   bits >= 5:  (table[s][0] - y)^2
// with y = round(w * weight_scale), w clamped to +-weight_limit. At 1 and 2 bits the table's
// numbers are multiples of 2^bits, gain and y fit a byte. At 3 and 4 bits gain * 2^bits is
// kEncodeSquare and table[s][0] = (table[s][1]^2 + kEncodeSquare / 2) / kEncodeSquare - 32768,
// rounded down. exl3/ops/encode.py makes the table and the scales.
constexpr int kEncodeSquare = 2048;
struct EncodeParams {
  const float* tiles;     // [n_tiles, 256] in stored order, finite
  const float* codebook;  // [65536] value of each state
  const int16_t* table;   // [nodes/16, 2^bits, 16, 2], see cpu/encode_step.h
  float weight_limit, weight_scale;
  int gain;
  uint16_t* trellis;  // [n_tiles, 16*bits] packed words
  float* values;      // [n_tiles, 256] codebook value of each position's state
  int64_t n_tiles;
  int bits;                  // 1..8
  unsigned char* workspace;  // CPU: [threads, encode_workspace_bytes(bits)], 64-byte aligned
  int threads;               // CPU: rows of the workspace. CUDA: multiprocessors of the device
};

int64_t encode_workspace_bytes(int bits);  // per thread, a multiple of 64

Status encode_cpu(const EncodeParams& p);

// Bytes of the whole workspace of a call, 256-byte aligned; its first 8 bytes receive the index of
// the first element of `tiles` that is NaN or infinite, or n_tiles * 256.
int64_t encode_cuda_workspace_bytes(int64_t n_tiles, int bits, int multiprocessors);

Status encode_cuda(const EncodeParams& p, CudaStream stream);

}  // namespace exl3
