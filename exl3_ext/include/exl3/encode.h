#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

constexpr int kStates = 65536;
constexpr int kEncodeLanes = 16;      // nodes in a row of the search table
constexpr int kEncodeTaggedBits = 4;  // up to this rate costs carry the chosen predecessor

// The walk (cpu/encode.cpp). Results depend on these numbers, so all backends share them.
constexpr int32_t kEncodeCap = 800'000'000;  // costs are at most this: base + edge cannot overflow
constexpr int32_t kEncodeShift = 500'000'000;  // at most this is taken off in one step
constexpr int kEncodeRing = 512;               // steps that can be traced back, a power of two
constexpr int kEncodeMaxSteps = 1024;          // then the lap is forced

// Steps beyond a lap before the first trace, and between traces, by bit rate.
struct EncodePatience {
  int first, more;
};
constexpr EncodePatience kEncodePatience[9] = {{0, 0},   {128, 64}, {96, 64}, {96, 64}, {64, 64},
                                               {48, 32}, {32, 32},  {32, 32}, {32, 32}};

// Trellis search, one tile at a time: the circular state sequence nearest to the tile.
// Costs are integers, so that every instruction level finds the same path. An edge costs
//   bits <= 4:  table[s][0] * gain * 2^bits + table[s][1] * y * 2^bits,  y = round(w *
//   weight_scale) bits >= 5:  (table[s][0] - y)^2
// with w clamped to +-weight_limit. exl3/ops/encode.py makes the table and the scales.
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
