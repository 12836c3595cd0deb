#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

// y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), per row.
struct RmsNormParams {
  const float* x;       // [rows, dim], rows x_stride apart
  const float* weight;  // [dim] or null for 1 (weight_offset is then not added)
  float* y;             // [rows, dim] row-major
  int64_t rows, dim, x_stride;
  float eps, weight_offset;
};

Status rms_norm_cpu(const RmsNormParams& p);

}  // namespace exl3
