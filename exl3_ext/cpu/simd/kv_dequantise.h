// K and V rows out of a quantised cache, see exl3/kv_quant.h. Included after kv_planes.h of a
// level. Bound by the unpacking: about 3 instructions a plane and 16 values, 3 more to scale them.
#pragma once
#include "cpu/simd/kv_rotate.h"
#include "exl3/kv_quant.h"

namespace exl3::EXL3_LEVEL {

// The same, to the bit, for a head in every lane: dim c is at x[c * step].
static void rotate_lanes(float* x, int64_t step, int dim) {
  for (int block = 0; block < quant_blocks(dim); ++block, x += kQuantBlock * step) {
    const int size = quant_block_size(dim, block), turn = quant_rotation(size);
    vec v[kQuantBlock];
    for (int i = 0; i < size; ++i) v[i] = vload(x + i * step);
    for (int h = 1; h < turn; h *= 2) {
      for (int i = 0; i < size; ++i) {
        if (i & h) continue;
        const vec a = v[i], b = v[i + h];
        v[i] = a + b;
        v[i + h] = a - b;
      }
    }
    const vec norm = vset(quant_rotation_norm(turn));
    for (int i = 0; i < size; ++i) vstore(x + i * step, v[i] * norm);
  }
}

// n rows of one head, still rotated, the first of them `row`, the others `step` apart.
template <int kBits>
static void dequantise_rows_of(const QuantRows& from, int64_t row, int64_t step, int dim, int n,
                               float* to) {
  const int blocks = quant_blocks(dim);
  constexpr float kHalf = static_cast<float>(1 << (kBits - 1));
  for (int t = 0; t < n; ++t, row += step, to += dim) {
    const half_bits* scales = from.scales + row * blocks;
    const uint32_t* words = from.words + row * blocks * kBits;
    for (int first = 0; first < blocks; first += kLanes) {
      const int count = blocks - first < kLanes ? blocks - first : kLanes;
      // code * step and offset both fit 24 bits: the value has no rounding.
      float steps[kLanes], offsets[kLanes];
      const vec step = vload_half_part(scales + first, count) * vset(1.0f / kHalf);
      vstore(steps, step);
      vstore(offsets, step * vset(0.5f - kHalf));
      for (int b = first; b < first + count; ++b) {
        vec codes[kBlockVectors];
        block_codes<kBits>(words + b * kBits, codes);
        float* out = to + b * kQuantBlock;
        const int left = dim - b * kQuantBlock;
        for (int i = 0; i < kBlockVectors; ++i) {
          const vec v = vfma(codes[i], vset(steps[b - first]), vset(offsets[b - first]));
          const int lanes = left - i * kLanes;
          if (lanes >= kLanes)
            vstore(out + i * kLanes, v);
          else if (lanes > 0)
            vstore_part(out + i * kLanes, v, lanes);
        }
      }
    }
  }
}

static void dequantise_rows(const QuantRows& from, int64_t row, int64_t step, int dim, int n,
                            float* to) {
  switch (from.bits) {
    case 2:
      return dequantise_rows_of<2>(from, row, step, dim, n, to);
    case 3:
      return dequantise_rows_of<3>(from, row, step, dim, n, to);
    case 4:
      return dequantise_rows_of<4>(from, row, step, dim, n, to);
    case 5:
      return dequantise_rows_of<5>(from, row, step, dim, n, to);
    case 6:
      return dequantise_rows_of<6>(from, row, step, dim, n, to);
    case 7:
      return dequantise_rows_of<7>(from, row, step, dim, n, to);
    default:
      return dequantise_rows_of<8>(from, row, step, dim, n, to);
  }
}

}  // namespace exl3::EXL3_LEVEL
