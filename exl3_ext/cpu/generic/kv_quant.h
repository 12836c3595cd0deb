// Quantised K and V rows in plain C++. Format: exl3/kv_quant.h.
#pragma once
#include <cmath>

#include "cpu/generic/half.h"
#include "exl3/kv_quant.h"

namespace exl3::generic {

// Rotates one head in place; its own inverse.
static inline void rotate_blocks(float* x, int dim) {
  for (int block = 0; block < quant_blocks(dim); ++block, x += kQuantBlock) {
    const int size = quant_block_size(dim, block), turn = quant_rotation(size);
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
}

static inline float quant_level(float x, float per_step, int bits) {
  const float half = static_cast<float>(1 << (bits - 1));
  const float code = std::nearbyint(x * per_step + (half - 0.5f));
  return code < 0 ? 0 : code > 2 * half - 1 ? 2 * half - 1 : code;
}

// The scale of a block of n values: NaN if one of them is not finite.
static inline half_bits quant_scale(const float* x, int n, int bits) {
  const float half = static_cast<float>(1 << (bits - 1));
  float most = 0, zero = 0;
  for (int i = 0; i < n; ++i) {
    most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
    zero += x[i] * 0.0f;
  }
  half_bits best = 0;
  float least = INFINITY;
  for (int c = 0; c < kQuantCandidates; ++c) {
    const half_bits scale = float_to_half(most * quant_candidate(bits, c) + zero);
    const float step = half_to_float(scale) / half, per_step = step > 0 ? 1.0f / step : 0.0f;
    float error = 0;
    for (int i = 0; i < n; ++i) {
      const float miss = x[i] - (quant_level(x[i], per_step, bits) - (half - 0.5f)) * step;
      error += miss * miss;
    }
    if (c && !(error < least)) continue;
    best = scale;
    least = error;
  }
  return best;
}

static inline void pack_codes(const uint32_t* codes, int bits, uint32_t* words) {
  int low = 0;
  for (int width = 8; width; width /= 2) {
    if (!(bits & width)) continue;
    const int each = 16 / width;
    const uint32_t mask = (1u << width) - 1;
    for (int w = 0; w < width; ++w) {
      uint32_t word = 0;
      for (int s = 0; s < each; ++s) {
        const int p = w * each + s;
        word |= (codes[p] >> low & mask) << (width * s);
        word |= (codes[16 + p] >> low & mask) << (width * s + 16);
      }
      *words++ = word;
    }
    low += width;
  }
}

static inline void unpack_codes(const uint32_t* words, int bits, uint32_t* codes) {
  for (int t = 0; t < kQuantBlock; ++t) codes[t] = 0;
  int low = 0;
  for (int width = 8; width; width /= 2) {
    if (!(bits & width)) continue;
    const int each = 16 / width;
    const uint32_t mask = (1u << width) - 1;
    for (int t = 0; t < kQuantBlock; ++t) {
      const int p = t % 16;
      codes[t] |= (words[p / each] >> (width * (p % each) + t / 16 * 16) & mask) << low;
    }
    words += width;
    low += width;
  }
}

// Stores head row `row` of dim values.
static inline void quantise_row(const float* x, int dim, const QuantRowsOut& to, int64_t row) {
  const int blocks = quant_blocks(dim), bits = to.bits;
  const float half = static_cast<float>(1 << (bits - 1));
  for (int b = 0; b < blocks; ++b) {
    const int n = quant_block_size(dim, b);
    float turned[kQuantBlock];
    for (int i = 0; i < n; ++i) turned[i] = x[b * kQuantBlock + i];
    rotate_blocks(turned, n);
    const half_bits scale = quant_scale(turned, n, bits);
    const float step = half_to_float(scale) / half;
    const bool usable = step > 0 && step < INFINITY;
    uint32_t codes[kQuantBlock] = {};
    for (int i = 0; i < n && usable; ++i) {
      codes[i] = static_cast<uint32_t>(quant_level(turned[i], 1.0f / step, bits));
    }
    const int64_t at = row * blocks + b;
    pack_codes(codes, bits, to.words + at * bits);
    to.scales[at] = scale;
  }
}

// Head row `row` of dim values, still rotated.
static inline void dequantise_row(const QuantRows& from, int64_t row, int dim, float* to) {
  const int blocks = quant_blocks(dim);
  const float half = static_cast<float>(1 << (from.bits - 1));
  for (int b = 0; b < blocks; ++b) {
    const int64_t at = row * blocks + b;
    const float step = half_to_float(from.scales[at]) / half;
    uint32_t codes[kQuantBlock];
    unpack_codes(from.words + at * from.bits, from.bits, codes);
    for (int i = 0; i < quant_block_size(dim, b); ++i) {
      to[b * kQuantBlock + i] = (static_cast<float>(codes[i]) - (half - 0.5f)) * step;
    }
  }
}

}  // namespace exl3::generic
