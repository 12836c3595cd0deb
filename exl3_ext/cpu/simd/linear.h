// Prologue and epilogue of the linear layer, for the level whose math.h, hadamard_inl.h and
// quantise.h came before. One 128-block in registers; about 250 instructions a block on 512 bits:
// small beside the product (a block of inputs meets hundreds of columns).
#pragma once
#include "cpu/linear_plan.h"
#include "cpu/simd/span.h"
#include "exl3/activation.h"

namespace exl3::EXL3_LEVEL {

constexpr int kVectors = kHadamardDim / kLanes;
constexpr float kTiny = 1e-30f;  // blocks below count as zero, as in the generic level

// Up to kLanes of `count` values, the rest zero.
static inline vec load_some(const float* x, int64_t count) {
  if (count >= kLanes) return vload(x);
  return count > 0 ? vload_part(x, static_cast<int>(count)) : vzero();
}

// (x normed) * suh of one block; inputs past in_features are zero.
static inline void load_block(const LinearParams& p, const float* x, const half_bits* suh,
                              float scale_of_row, int64_t block, vec* v) {
  for (int r = 0; r < kVectors; ++r) {
    const int64_t at = block * kHadamardDim + kLanes * r, rest = p.in_features - at;
    vec value = load_some(x + at, rest);
    if (p.norm_weight) {
      const vec weight = load_some(p.norm_weight + at, rest) + vset(p.norm_offset);
      value = value * vset(scale_of_row) * weight;
    }
    v[r] = rest > 0 ? value * vload_half(suh + at) : vzero();
  }
}

// Where a block's quantised activations go.
static inline LinearTarget place_of(const LinearParams& p, const LinearWeightPlan& w, int64_t row,
                                    int64_t block) {
  const LinearKernel kernel = w.choice.kernel;
  if (kernel != LinearKernel::kTiles && kernel != LinearKernel::kMany) {
    return {kernel, 0, w.q + row * p.k + block * kHadamardDim};
  }
  // [m/16, tiles of inputs, planes, 16 rows] of 64 bytes: 16 inputs (kTiles) or 64 (kMany)
  const int64_t inputs = kernel == LinearKernel::kTiles ? 16 : 64;
  const int64_t tile = row / 16 * (p.k / inputs) + block * (kHadamardDim / inputs);
  return {kernel, w.choice.planes, w.q + (tile * w.choice.planes * 16 + row % 16) * 32};
}

static void linear_prologue(const LinearParams& p, const LinearWeightPlan& w, int weight,
                            int64_t row, int64_t begin, int64_t end) {
  const float* x = p.x + row * p.x_stride;
  const float scale_of_row = p.norm_weight ? inverse_rms(x, p.in_features, p.norm_eps) : 1.0f;
  const LinearWeightRef& ref = p.w[weight];
  const float q_max = static_cast<float>(w.choice.q_max);
  const LinearScale scale = linear_scale(ref.codebook);
  for (int64_t block = begin; block < end; ++block) {
    vec v[kVectors];
    load_block(p, x, ref.suh, scale_of_row, block, v);
    hadamard128(v);
    const float peak = peak_of(v);
    const float inverse = peak < kTiny ? 0.0f : q_max / peak;
    // A block that is not finite is all zeros with a scale that is not finite.
    const int32_t sum = quantise(v, inverse, peak <= __FLT_MAX__, place_of(p, w, row, block));
    const float unit = (peak < kTiny ? 0.0f : peak / q_max) * kHadamardNorm;
    const float offset = unit * scale.zero * static_cast<float>(sum);
    const int64_t blocks = p.k / kHadamardDim;
    if (w.choice.kernel == LinearKernel::kMany) {
      auto* tiles = reinterpret_cast<LinearTileMeta*>(w.meta);
      LinearTileMeta& tile = tiles[row / 16 * blocks + block];
      tile.scale[row % 16] = unit * scale.step;
      tile.offset[row % 16] = offset;
    } else {
      w.meta[row * blocks + block] = {unit * scale.step, offset, -scale.centre * sum};
    }
  }
}

static inline vec activate(int kind, vec x) {
  switch (static_cast<Activation>(kind)) {
    case Activation::kSilu:
      return vsilu(x);
    case Activation::kGelu:
      return vgelu(x);
    case Activation::kGeluTanh:
      return vgelu_tanh(x);
    default:
      return vrelu(x);
  }
}

// 128 outputs of one weight and row, bias included; columns past `columns` are not meaningful.
static inline void output_block(const LinearWeightRef& ref, const float* inner, int64_t m,
                                int64_t first, int64_t columns, vec* v) {
  for (int r = 0; r < kVectors; ++r) {
    const int64_t column = first + kLanes * r;
    v[r] = vload(inner + column / kTileDim * m * kTileDim + column % kTileDim);
  }
  hadamard128(v);
  for (int r = 0; r < kVectors; ++r) {
    const int64_t at = kLanes * r;
    v[r] = v[r] * (vload_half(ref.svh + first + at) * vset(kHadamardNorm));
    if (ref.bias) v[r] = v[r] + load_some(ref.bias + first + at, columns - at);
  }
}

static void linear_epilogue(const LinearParams& p, const LinearPlan& plan, int weight,
                            int64_t block) {
  const bool gated = p.activation >= 0;
  const int first_weight = gated ? 0 : weight;
  const int64_t first = block * kHadamardDim;
  int64_t start = first;  // column of y
  for (int i = 0; i < first_weight; ++i) start += p.w[i].out_features;
  const LinearWeightRef& ref = p.w[first_weight];
  const int64_t columns = ref.out_features - first;
  for (int64_t row = 0; row < p.m; ++row) {
    vec v[kVectors], up[kVectors];
    const int64_t at_row = row * kTileDim;
    output_block(ref, plan.w[first_weight].inner + at_row, p.m, first, columns, v);
    if (gated) {
      output_block(p.w[1], plan.w[1].inner + at_row, p.m, first, columns, up);
      for (int r = 0; r < kVectors; ++r) v[r] = activate(p.activation, v[r]) * up[r];
    }
    float* y = p.y + row * p.y_stride + start;
    const float* residual = p.residual ? p.residual + row * p.residual_stride + start : nullptr;
    for (int r = 0; r < kVectors; ++r) {
      const int64_t at = kLanes * r, rest = columns - at;
      if (rest <= 0) break;
      if (residual) v[r] = v[r] + load_some(residual + at, rest);
      if (rest >= kLanes)
        vstore(y + at, v[r]);
      else
        vstore_part(y + at, v[r], static_cast<int>(rest));
    }
  }
}

}  // namespace exl3::EXL3_LEVEL
