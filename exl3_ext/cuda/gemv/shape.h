// Sizes that the kernel and the choice of its configuration share.
#pragma once
#include "exl3/gemv.h"

namespace exl3::cuda {

constexpr int kGemvSumPitch = 72;  // floats a row of a warp's 64 sums: rows fall in other banks
constexpr int kStepsOfBlock = kHadamardDim / kTileDim;

// Rows of a fragment: two byte columns a row for mul1, one float16 column otherwise.
constexpr int gemv_fragment_rows(bool integer) { return integer ? 4 : 8; }
// Steps (16 inputs) of weights in flight in a warp.
constexpr int gemv_depth(int bits) { return bits <= 4 ? 8 : 4; }

constexpr int gemv_step_bytes(bool integer, int fragments) {
  return fragments * (integer ? 128 : 256);
}

// One row is transformed by every thread block for itself; more rows once, by a launch before.
constexpr bool gemv_fused(int rows) { return rows == 1; }

struct GemvShared {
  int ring, activations, inbox, total;  // bytes
};

constexpr GemvShared gemv_shared(bool integer, bool pair, int bits, int fragments, int rows,
                                 int k_blocks, int cluster) {
  GemvShared s{};
  const int stages = gemv_depth(bits) * 128 * bits, sums = kGemvSumPitch * 4 * rows;
  s.ring = kGemvWarps * (stages > sums ? stages : sums);
  const int blocks = (k_blocks + cluster - 1) / cluster;
  s.activations = blocks * kStepsOfBlock * gemv_step_bytes(integer, fragments) * (pair ? 2 : 1);
  const int own_rows = (rows + cluster - 1) / cluster;
  s.inbox = cluster * own_rows * (kHadamardDim * (pair ? 2 : 1) + 4) * 4;
  s.total = s.ring + s.activations + s.inbox;
  return s;
}

}  // namespace exl3::cuda
