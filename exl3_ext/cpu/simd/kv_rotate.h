// Rotation of the blocks of a head, see exl3/kv_quant.h. Included after vec.h of a level. A block
// of 32 values is kBlockVectors registers.
#pragma once
#include "cpu/simd/span.h"
#include "exl3/kv_quant.h"

namespace exl3::EXL3_LEVEL {

constexpr int kBlockVectors = kQuantBlock / kLanes;

// Five rounds of "sums of neighbours to the front, differences behind": each turns the order of the
// index bits by one place, so after five it is what it was.
static inline void rotate_block(vec* x) {
#pragma GCC unroll 5
  for (int round = 0; round < 5; ++round) {
    vec sum[kBlockVectors / 2], difference[kBlockVectors / 2];
#pragma GCC unroll 2
    for (int i = 0; i < kBlockVectors / 2; ++i) {
      vec even = x[2 * i], odd = x[2 * i + 1];
      vunzip(even, odd);
      sum[i] = even + odd;
      difference[i] = even - odd;
    }
#pragma GCC unroll 2
    for (int i = 0; i < kBlockVectors / 2; ++i) {
      x[i] = sum[i];
      x[kBlockVectors / 2 + i] = difference[i];
    }
  }
  for (int i = 0; i < kBlockVectors; ++i) x[i] = x[i] * vset(quant_rotation_norm(kQuantBlock));
}

static inline void rotate_short_block(float* x, int size) {
  const int turn = quant_rotation(size);
  for (int h = 1; h < turn; h *= 2) {
    for (int i = 0; i < size; ++i) {
      if (i & h) continue;
      const float a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    }
  }
  for (int i = 0; i < size; ++i) x[i] *= quant_rotation_norm(turn);
}

// Rotates one head in place; its own inverse.
static inline void rotate_blocks(float* x, int dim) {
  for (; dim >= kQuantBlock; dim -= kQuantBlock, x += kQuantBlock) {
    vec v[kBlockVectors];
    for (int i = 0; i < kBlockVectors; ++i) v[i] = vload(x + i * kLanes);
    rotate_block(v);
    for (int i = 0; i < kBlockVectors; ++i) vstore(x + i * kLanes, v[i]);
  }
  if (dim) rotate_short_block(x, dim);
}

}  // namespace exl3::EXL3_LEVEL
