#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

enum class Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3 };
constexpr int kActivations = 4;

// y = act(gate) * up.
struct GatedActivationParams {
  const float* gate_up;  // [rows, 2 * dim]: gate, then up; rows x_stride apart
  float* y;              // [rows, dim] row-major
  int64_t rows, dim, x_stride;
  Activation kind;
};

Status gated_activation_cpu(const GatedActivationParams& p);

}  // namespace exl3
