#include <cmath>

#include "cpu/generic/rows.h"

namespace exl3::generic {

float activate(Activation kind, float x) {
  switch (kind) {
    case Activation::kSilu:
      return x / (1.0f + std::exp(-x));
    case Activation::kGelu:
      return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
    case Activation::kGeluTanh:  // 0.5 (1 + tanh u) = 1 / (1 + exp(-2u))
      return x / (1.0f + std::exp(-1.59576912f * (x + 0.044715f * x * x * x)));
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;
  }
  return x;
}

void gated_activation_span(const GatedActivationParams& p, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; ++at) {
    const float* gate = p.gate_up + at / p.dim * p.x_stride + at % p.dim;
    p.y[at] = activate(p.kind, gate[0]) * gate[p.dim];
  }
}

}  // namespace exl3::generic
