#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

constexpr int kStates = 65536;
constexpr int kEncodeLanes = 16;  // nodes in a row of the search table; of a coarse one:
constexpr int kEncodeCoarseLanes = 32;
constexpr int kEncodeCoarseBits = 3;  // up to this rate costs have 16 bits
constexpr int kEncodeTaggedBits = 4;  // at this rate they carry the chosen predecessor

// The walk (cpu/encode.cpp). Results depend on these numbers, so all backends share them.
//
// 3 bits or fewer. An edge is the square of a difference in steps of 1 to 1024, above which all are
// 1024: what half a float16 plus its square holds between 0.5 and 1. The table has multiples of
// 2^encode_coarse_shift, so that the product instructions of 16 bits divide the square by 2^15, and
// weights lie half-way between two of them, so that no square is half-way between two steps.
// A wide edge counts in steps four times as large, and halves are rounded down; it goes with
// weights in the tails of the codebook, where few states are near; these are multiples themselves,
// as a float16 has no room for halves there.
// Costs are relative to the least of some nodes one step before; their spread is at most
// 15 * 1024, 7 * 1024 or 5 * 4096, as a node is reached from any other in so many steps.
constexpr int encode_coarse_shift(int bits) { return bits == 3 ? 4 : 3; }
constexpr int kEncodeCoarseMost = 1024;
constexpr int encode_coarse_edge(int number, int y, bool wide) {
  const int d = (number - y) / (wide ? 2 : 1), steps = (d * d + 16383) >> 15;
  return (steps < kEncodeCoarseMost ? steps : kEncodeCoarseMost) << (wide ? 2 : 0);
}
constexpr bool encode_wide(int bits, int y) {
  return bits == 3 && (y < 0 ? -y : y) >= 512 << encode_coarse_shift(3);
}
// From the weight times its scale, rounded down and to the nearest.
constexpr int encode_coarse_weight(int bits, int down, int nearest) {
  const int shift = encode_coarse_shift(bits), y = (2 * down + 1) * (1 << shift) / 2;
  return encode_wide(bits, y) ? nearest * (1 << shift) : y;
}
constexpr int kEncodeCoarseFar = 17000;  // cost of nodes that a walk must not begin in
constexpr int kEncodeReferences = 64;    // the first so many multiples of 2^bits give the reference
// Where a state's number is in a coarse table [nodes/32, 2^bits, 32].
constexpr int encode_coarse_place(int bits, int h, int node) {
  const int fan = 1 << bits, lane = (node & (fan - 1)) * (32 >> bits) + ((node & 31) >> bits);
  return ((node >> 5) * fan + h) * 32 + lane;
}

// 4 bits or more. Costs are at most the cap: base + edge cannot overflow.
constexpr int32_t kEncodeCap = 800'000'000;
constexpr int32_t kEncodeShift = 500'000'000;  // at most this is taken off in one step
// What a step keeps of a tagged cost; the tag comes below it.
constexpr int32_t encode_keep(int bits) { return bits == kEncodeTaggedBits ? -16 : -1; }
// What a step takes off all costs, by the least of them before it.
constexpr int32_t encode_shift(int bits, int32_t low) {
  const int32_t kept = low & encode_keep(bits);
  return kept < kEncodeShift ? kept : kEncodeShift;
}
constexpr int kEncodeUnit = 16;   // gain and weight are multiplied by it: edges are multiples
constexpr int kEncodeRing = 512;  // steps kept for tracing back, a power of two
// How many of them a trace may go back: where only every fourth row of costs is kept, the row
// before them is still there.
constexpr int encode_reach(int bits) { return kEncodeRing - (bits <= kEncodeCoarseBits ? 4 : 1); }

// Steps beyond a lap before the first trace, and between traces; after `most` steps or more the lap
// is forced. By bit rate.
struct EncodePatience {
  int first, more, most;
};
constexpr EncodePatience kEncodePatience[9] = {{0, 0, 0},     {128, 64, 600}, {96, 64, 600},
                                               {96, 64, 448}, {64, 64, 448},  {64, 32, 448},
                                               {32, 32, 448}, {32, 32, 448},  {32, 32, 448}};

// Trellis search, one tile at a time: the circular state sequence nearest to the tile.
// Costs are integers, so that every instruction level finds the same path. An edge costs
//   bits <= 3:  encode_coarse_edge(table[s], y)
//   bits == 4:  (table[s][0] * gain + table[s][1] * y) * kEncodeUnit
//   bits >= 5:  (table[s][0] - y)^2
// with y = round(w * weight_scale), w clamped to +-weight_limit; up to 3 bits
// encode_coarse_weight. At 4 bits gain * 16 is kEncodeSquare and
// table[s][0] = (table[s][1]^2 + kEncodeSquare / 2) / kEncodeSquare - 32768, rounded down.
// exl3/ops/encode.py makes the table and the scales.
constexpr int kEncodeSquare = 2048;
struct EncodeParams {
  const float* tiles;     // [n_tiles, 256] in stored order, finite
  const float* codebook;  // [65536] value of each state
  const int16_t* table;   // [nodes/16, 2^bits, 16, 2], see cpu/encode_step.h; coarse: see above
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
