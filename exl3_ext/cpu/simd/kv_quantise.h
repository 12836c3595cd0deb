// K and V rows into a quantised cache, see exl3/kv_quant.h. Included after vec.h of a level.
#pragma once
#include "cpu/simd/kv_rotate.h"
#include "exl3/kv_quant.h"

namespace exl3::EXL3_LEVEL {

static inline void block_levels(const vec* x, float per_step, float half, vec* codes) {
  for (int i = 0; i < kBlockVectors; ++i) {
    const vec code = vround(x[i] * vset(per_step) + vset(half - 0.5f));
    codes[i] = vmin(vmax(code, vzero()), vset(2 * half - 1));
  }
}

// Codes of a block of n values under the best scale, and that scale.
static inline void quantise_block(const vec* x, int n, int bits, vec* codes, half_bits* stored) {
  const float half = static_cast<float>(1 << (bits - 1));
  vec most = vzero(), zero = vzero();
  for (int i = 0; i < kBlockVectors; ++i) {
    most = vmax(vabs(x[i]), most);
    zero = vfma(x[i], vzero(), zero);  // NaN if a value is not finite
  }
  float tries[kLanes] = {};
  const float top = vtop(most), bad = vsum(zero);
  for (int c = 0; c < kQuantCandidates; ++c) tries[c] = top * quant_candidate(bits, c) + bad;
  half_bits scales[kLanes];
  vstore_half(scales, vload(tries));
  vstore(tries, vload_half(scales));
  float least = 0;
  for (int c = 0; c < kQuantCandidates; ++c) {
    const float step = tries[c] / half;
    vec own[kBlockVectors], error = vzero();
    block_levels(x, step > 0 ? 1.0f / step : 0.0f, half, own);
    for (int i = 0; i < kBlockVectors; ++i) {
      const vec miss = vfnma(own[i] - vset(half - 0.5f), vset(step), x[i]);
      error = vfma(miss, vselect(vhead(n - i * kLanes), miss, vzero()), error);
    }
    const float sum = vsum(error);
    if (c && !(sum < least)) continue;
    least = sum;
    *stored = scales[c];
    const bool usable = step > 0 && step < __builtin_inff();
    for (int i = 0; i < kBlockVectors; ++i) {
      codes[i] = usable ? vselect(vhead(n - i * kLanes), own[i], vzero()) : vzero();
    }
  }
}

static inline void pack_codes(const vec* codes, int bits, uint32_t* words) {
  float whole[kQuantBlock];
  uint32_t pair[16];
  for (int i = 0; i < kBlockVectors; ++i) vstore(whole + i * kLanes, codes[i]);
  for (int p = 0; p < 16; ++p) {
    pair[p] = static_cast<uint32_t>(static_cast<int32_t>(whole[p])) |
              static_cast<uint32_t>(static_cast<int32_t>(whole[16 + p])) << 16;
  }
  int low = 0;
  for (int width = 8; width; width /= 2) {
    if (!(bits & width)) continue;
    const int each = 16 / width;
    const uint32_t mask = ((1u << width) - 1) * 0x10001u;
    for (int w = 0; w < width; ++w) {
      uint32_t word = 0;
      for (int s = 0; s < each; ++s) word |= (pair[w * each + s] >> low & mask) << (width * s);
      *words++ = word;
    }
    low += width;
  }
}

// Stores head row `row` of dim values.
static void quantise_row(const float* x, int dim, const QuantRowsOut& to, int64_t row) {
  const int blocks = quant_blocks(dim);
  for (int b = 0; b < blocks; ++b, x += kQuantBlock) {
    const int n = quant_block_size(dim, b);
    vec v[kBlockVectors], codes[kBlockVectors];
    if (n == kQuantBlock) {
      for (int i = 0; i < kBlockVectors; ++i) v[i] = vload(x + i * kLanes);
      rotate_block(v);
    } else {
      float turned[kQuantBlock] = {};
      for (int i = 0; i < n; ++i) turned[i] = x[i];
      rotate_short_block(turned, n);
      for (int i = 0; i < kBlockVectors; ++i) v[i] = vload(turned + i * kLanes);
    }
    const int64_t at = row * blocks + b;
    quantise_block(v, n, to.bits, codes, to.scales + at);
    pack_codes(codes, to.bits, to.words + at * to.bits);
  }
}

}  // namespace exl3::EXL3_LEVEL
