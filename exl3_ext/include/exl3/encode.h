#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

constexpr int kStates = 65536;

// Per tile: the circular state sequence of small (locally minimal, see cpu/encode.cpp) squared
// error against the tile.
struct EncodeParams {
  const float* tiles;     // [tiles, 256] in stored order, finite
  const float* codebook;  // [65536] value of each state, finite
  uint16_t* trellis;      // [tiles, 16*bits] packed words
  float* values;          // [tiles, 256] codebook value of each position's state
  int64_t n_tiles;
  int bits;                  // 1..8
  unsigned char* workspace;  // [threads, encode_workspace_bytes(bits)], 64-byte aligned
  int threads;               // rows of the workspace
};

int64_t encode_workspace_bytes(int bits);  // per thread, a multiple of 64

Status encode_cpu(const EncodeParams& p);

}  // namespace exl3
