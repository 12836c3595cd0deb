// The fused trellis linear layer: one launch for a group of weights that share their input.
#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

constexpr int kLinearGroup = 4;  // weights in one launch, at most

struct LinearWeightRef {
  const uint16_t* planes;  // [n/16, k/16, 16*bits] lane planes (trellis.h)
  const half_bits* suh;    // [k] float16
  const half_bits* svh;    // [n] float16
  const float* bias;       // [out_features] or null
  int64_t n;               // padded, a multiple of 128
  int64_t out_features;    // <= n; what is stored
  int bits;
  Codebook codebook;
};

// What every device needs to know of a call.
struct LinearGroup {
  int64_t m, in_features;
  int64_t k;                 // padded, a multiple of 128
  const float* norm_weight;  // [in_features] or null
  float norm_eps, norm_offset;
  LinearWeightRef w[kLinearGroup];
  int count;
  int activation;  // -1: none; else 0 silu, 1 gelu, 2 gelu_tanh, 3 relu
};

// For each weight w:  y_w = Hblk( Hblk(x' * suh) @ W' ) * svh + bias, cut to out_features, with
// x' = x, or RMSNorm(x) when norm_weight is set, zero-extended from in_features to k. Then
//   activation < 0:  y = [y_0 | y_1 | ...]
//   otherwise:       y = act(y_0) * y_1 (count == 2, equal sizes)
// and + residual if there is one.
struct LinearParams : LinearGroup {
  const float* x;  // [m, in_features], rows x_stride apart
  int64_t x_stride;
  const float* residual;  // [m, columns of y], rows residual_stride apart, may be y; or null
  int64_t residual_stride;
  float* y;  // [m, columns], rows y_stride apart
  int64_t y_stride;
  unsigned char* workspace;  // linear_workspace_bytes(p), 64-byte aligned; contents do not matter
  int64_t workspace_bytes;
};

int64_t linear_workspace_bytes(const LinearParams& p);
Status linear_cpu(const LinearParams& p);

}  // namespace exl3
