// The row-wise ops over vectors: norm, gated activation, embedding, argmax, rotary embedding.
// Included by rows.cpp of each level, after its math.h. All of them are bound by memory or by the
// call itself at the sizes of a decode step.
#pragma once
#include "cpu/simd/kv_quantise.h"
#include "cpu/simd/span.h"
#include "exl3/activation.h"
#include "exl3/embedding.h"
#include "exl3/norm.h"
#include "exl3/rope.h"
#include "exl3/sampling.h"

namespace exl3::EXL3_LEVEL {

static void rms_norm_rows(const RmsNormParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* x = p.x + row * p.x_stride;
    const float scale = inverse_rms(x, p.dim, p.eps);
    scale_row(x, p.y + row * p.dim, p.dim, scale, p.weight, p.weight_offset);
  }
}

template <class F>
static inline void gated_rows(const GatedActivationParams& p, int64_t begin, int64_t end,
                              const F& act) {
  while (begin < end) {
    const int64_t row = begin / p.dim, column = begin % p.dim;
    const int64_t count = end - begin < p.dim - column ? end - begin : p.dim - column;
    const float* gate = p.gate_up + row * p.x_stride + column;
    float* y = p.y + begin;
    each_vector(count, [&](int64_t i, int n) {
      store_n(y + i, act(load_n(gate + i, n)) * load_n(gate + p.dim + i, n), n);
    });
    begin += count;
  }
}

static void gated_activation_span(const GatedActivationParams& p, int64_t begin, int64_t end) {
  switch (p.kind) {
    case Activation::kSilu:
      return gated_rows(p, begin, end, [](vec x) { return vsilu(x); });
    case Activation::kGelu:
      return gated_rows(p, begin, end, [](vec x) { return vgelu(x); });
    case Activation::kGeluTanh:
      return gated_rows(p, begin, end, [](vec x) { return vgelu_tanh(x); });
    case Activation::kRelu:
      return gated_rows(p, begin, end, [](vec x) { return vrelu(x); });
  }
}

static inline vec load_any(const void* base, DType dtype, int64_t i, int n) {
  if (dtype == DType::kFloat32) return load_n(static_cast<const float*>(base) + i, n);
  const half_bits* p = static_cast<const half_bits*>(base) + i;
  if (dtype == DType::kFloat16) return n == kLanes ? vload_half(p) : vload_half_part(p, n);
  if (n == kLanes) return vload_bf16(p);
  bf16_bits whole[kLanes] = {};
  for (int j = 0; j < n; ++j) whole[j] = p[j];
  return vload_bf16(whole);
}

static void embedding_rows(const EmbeddingParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = p.ids[row] * p.dim;
    float* y = p.y + row * p.dim;
    each_vector(p.dim, [&](int64_t i, int n) {
      store_n(y + i, load_any(p.table, p.dtype, at + i, n) * vset(p.scale), n);
    });
  }
}

// First pass: the greatest value, NaN dropped. Second pass: where it is first.
static void argmax_rows(const ArgmaxParams& p, int64_t begin, int64_t end) {
  const vec low = vset(-__builtin_inff());
  for (int64_t row = begin; row < end; ++row) {
    const float* x = p.x + row * p.x_stride;
    vec best[4] = {low, low, low, low};
    int64_t i = 0;
    for (; i + 4 * kLanes <= p.valid; i += 4 * kLanes) {
      for (int j = 0; j < 4; ++j) best[j] = vmax(vload(x + i + j * kLanes), best[j]);
    }
    each_vector(p.valid - i, [&](int64_t at, int n) {
      best[0] = vmax(vselect(vhead(n), load_n(x + i + at, n), low), best[0]);
    });
    const vec top = vset(vtop(vmax(vmax(best[0], best[1]), vmax(best[2], best[3]))));
    int64_t index = -1;
    for (i = 0; i < p.valid && index < 0; i += kLanes) {
      const int n = p.valid - i < kLanes ? static_cast<int>(p.valid - i) : kLanes;
      const vmask hit = vand(vhead(n), vequal(load_n(x + i, n), top));
      if (vany(hit)) index = i + vfirst(hit);
    }
    p.index[row] = index < 0 ? 0 : index;
  }
}

static inline void rotate_pair(vec& a, vec& b, vec c, vec s) {
  const vec turned = a * c - b * s;
  b = b * c + a * s;
  a = turned;
}

static inline void rotate_halves(float* x, const float* table, int half) {
  each_vector(half, [&](int64_t i, int n) {
    vec a = load_n(x + i, n), b = load_n(x + half + i, n);
    rotate_pair(a, b, load_n(table + i, n), load_n(table + half + i, n));
    store_n(x + i, a, n);
    store_n(x + half + i, b, n);
  });
}

static inline void rotate_interleaved(float* x, const float* table, int half) {
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    vec a = vload(x + 2 * i), b = vload(x + 2 * i + kLanes);
    vunzip(a, b);
    rotate_pair(a, b, vload(table + i), vload(table + half + i));
    vzip(a, b);
    vstore(x + 2 * i, a);
    vstore(x + 2 * i + kLanes, b);
  }
  for (; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * table[i] - b * table[half + i];
    x[2 * i + 1] = b * table[i] + a * table[half + i];
  }
}

static inline void store_half_row(const float* x, half_bits* to, int64_t count) {
  each_vector(count, [&](int64_t i, int n) {
    if (n == kLanes)
      vstore_half(to + i, vload(x + i));
    else
      vstore_half_part(to + i, vload_part(x + i, n), n);
  });
}

static void rope_append_rows(const RopeAppendParams& p, int64_t begin, int64_t end) {
  const int64_t k_width = static_cast<int64_t>(p.kv_heads) * p.head_dim;
  const int64_t v_width = static_cast<int64_t>(p.kv_heads) * p.v_head_dim;
  for (int64_t row = begin; row < end; ++row) {
    float* q = p.qkv + row * p.stride;
    float* k = q + static_cast<int64_t>(p.q_heads) * p.head_dim;
    const float* table = p.rot ? p.table + row * p.rot : nullptr;
    for (int h = 0; h < p.q_heads + p.kv_heads; ++h) {
      float* x = q + static_cast<int64_t>(h) * p.head_dim;
      const float* weight = h < p.q_heads ? p.q_norm : p.k_norm;
      if (weight) {
        scale_row(x, x, p.head_dim, inverse_rms(x, p.head_dim, p.eps), weight, p.norm_offset);
      }
      if (!table) continue;
      if (p.interleaved)
        rotate_interleaved(x, table, p.rot / 2);
      else
        rotate_halves(x, table, p.rot / 2);
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
    store_half_row(k, p.k_cache + p.slots[row] * k_width, k_width);
    store_half_row(k + k_width, p.v_cache + p.slots[row] * v_width, v_width);
  }
}

}  // namespace exl3::EXL3_LEVEL
