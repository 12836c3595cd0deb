// Where the parts of a linear launch lie in its workspace, and what its kernels are given.
#pragma once
#include "cpu/linear_select.h"
#include "exl3/linear.h"

namespace exl3 {

// Of one 128-block of one row of quantised activations. Kernels form sum q * v in integers, convert
// it to float32 and add scale times it to a column's total with one rounding, block after block, so
// that all kernels and levels agree to the bit.
struct LinearBlockMeta {
  float scale;   // value of one unit of sum q * v
  float offset;  // what the block adds to every output: scale * (value of v = 0) * sum q
  int32_t init;  // -centre * sum q: where the integer sum starts
};

// The same of 16 rows, for kMany, whose weights are centred.
struct LinearTileMeta {
  float scale[16], offset[16];
};

// Where the prologue stores a block.
struct LinearTarget {
  LinearKernel kernel;
  int planes;  // kTiles, kMany
  int16_t* q;
};

struct LinearWeightPlan {
  LinearChoice choice;
  // [m, k] quantised activations; the 16 of a tile in the order (e, j) -> input 2j + {0,1,8,9}[e],
  // e, j = 0..3. kWords: int16. kBytes: an int8 twice. kTiles, kMany: tiles of AMX, see there.
  int16_t* q;
  LinearBlockMeta* meta;  // [m, k/128]; kMany: LinearTileMeta [m/16, k/128]
  float* inner;           // [n/16, m, 16] x' after the first transform, times W'
};

struct LinearPlan {
  LinearWeightPlan w[kLinearGroup];
  int32_t* counters;  // [0]: prologue parts done; [1 + group]: strips done of an output group
  int64_t groups;     // output groups: 128 columns of one weight, or of gate and up together
  int64_t bytes;      // of workspace
};

constexpr int64_t kLinearRows = 1024;  // more are done in parts, which bounds the workspace

LinearPlan linear_plan(const LinearParams& p, Isa isa);

// One weight's inner product for strips [begin, end) of 16 columns and all rows.
struct LinearStrips {
  const uint16_t* planes;  // of strip 0
  const int16_t* q;
  const LinearBlockMeta* meta;
  float* inner;
  int64_t m, k, n;
  int64_t begin, end;
  int bits;
  Codebook codebook;
  int q_planes;  // of bytes: kTiles, kMany
};

// 16 columns of a row.
static inline float* inner_at(const LinearStrips& s, int64_t strip, int64_t row) {
  return s.inner + (strip * s.m + row) * kTileDim;
}

// Weights as integers: w = step * v + zero, v a 16-bit integer around `centre`. The rounding of
// the decoded weight to float16, about 3e-4 of its deviation, is left out.
struct LinearScale {
  float step, zero;
  int centre;
};
static constexpr LinearScale linear_scale(Codebook codebook) {
  // mul1: v is the byte sum; w = a * (1024 + v) + c, counted from v = 510.
  constexpr float kA = 1774.0f / 262144.0f;  // 0x1EEE
  constexpr float kC = -10.3828125f;         // 0xC931
  if (codebook == Codebook::kMul1) return {kA, kA * 1534.0f + kC, 510};
  return {1.0f / 8192.0f, 0.0f, 0};  // 3inst, mcg: the sum of two numbers of 13 binary places
}

constexpr float kHadamardNorm = 0.08838834764831845f;  // 1 / sqrt(128)

}  // namespace exl3
