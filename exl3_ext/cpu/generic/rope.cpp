// Rotation table, and the in-place norm, rotation and cache append of q/k/v rows.
#include <cmath>

#include "cpu/generic/half.h"
#include "cpu/generic/kv_quant.h"
#include "cpu/generic/rows.h"

namespace exl3::generic {
namespace {

void norm_head(float* x, const float* weight, const RopeAppendParams& p) {
  double sum = 0;
  for (int i = 0; i < p.head_dim; ++i) sum += static_cast<double>(x[i]) * x[i];
  const float scale = static_cast<float>(1.0 / std::sqrt(sum / p.head_dim + p.eps));
  for (int i = 0; i < p.head_dim; ++i) x[i] = x[i] * scale * (weight[i] + p.norm_offset);
}

void rotate_head(float* x, const float* table, const RopeAppendParams& p) {
  const int half = p.rot / 2;
  for (int i = 0; i < half; ++i) {
    float* a = p.interleaved ? x + 2 * i : x + i;
    float* b = p.interleaved ? a + 1 : a + half;
    const float c = table[i], s = table[half + i], u = *a, v = *b;
    *a = u * c - v * s;
    *b = v * c + u * s;
  }
}

void store_row(const float* x, half_bits* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = float_to_half(x[i]);
}

}  // namespace

void rope_table_rows(const RopeTableParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    float* cosine = p.table + row * 2 * p.half;
    float* sine = cosine + p.half;
    for (int64_t i = 0; i < p.half; ++i) {
      const double angle = static_cast<double>(p.positions[row]) * p.inv_freq[i];
      cosine[i] = static_cast<float>(std::cos(angle) * p.scale);
      sine[i] = static_cast<float>(std::sin(angle) * p.scale);
    }
  }
}

void rope_append_rows(const RopeAppendParams& p, int64_t begin, int64_t end) {
  const int64_t k_width = static_cast<int64_t>(p.kv_heads) * p.head_dim;
  const int64_t v_width = static_cast<int64_t>(p.kv_heads) * p.v_head_dim;
  for (int64_t row = begin; row < end; ++row) {
    float* q = p.qkv + row * p.stride;
    float* k = q + static_cast<int64_t>(p.q_heads) * p.head_dim;
    for (int h = 0; h < p.q_heads + p.kv_heads; ++h) {
      float* x = q + static_cast<int64_t>(h) * p.head_dim;
      const float* weight = h < p.q_heads ? p.q_norm : p.k_norm;
      if (weight) norm_head(x, weight, p);
      if (p.rot) rotate_head(x, p.table + row * p.rot, p);
    }
    if (!p.slots || p.slots[row] < 0) continue;
    if (p.k_quant.bits) {
      for (int h = 0; h < p.kv_heads; ++h) {
        const int64_t at = p.slots[row] * p.kv_heads + h;
        quantise_row(k + static_cast<int64_t>(h) * p.head_dim, p.head_dim, p.k_quant, at);
        quantise_row(k + k_width + static_cast<int64_t>(h) * p.v_head_dim, p.v_head_dim, p.v_quant,
                     at);
      }
      continue;
    }
    store_row(k, p.k_cache + p.slots[row] * k_width, k_width);
    store_row(k + k_width, p.v_cache + p.slots[row] * v_width, v_width);
  }
}

}  // namespace exl3::generic
