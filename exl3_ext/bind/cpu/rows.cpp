// Bindings of the row-wise ops: norm, activation, embedding, argmax.
#include <torch/csrc/stable/library.h>

#include "bind/cpu/launch.h"
#include "bind/rows_params.h"

namespace exl3::bind {
namespace {

Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                double weight_offset) {
  EXL3_CHECK_CPU("rms_norm", x);
  RmsNormParams p = rms_norm_params<float>(x, weight, eps, weight_offset);
  Tensor y = allocate(x, {x.sizes().begin(), x.sizes().end()});
  std::vector<Tensor> kept{x, y};
  if (weight) kept.push_back(*weight);
  p.y = data_mut<float>(y);
  launch("rms_norm", rms_norm_cpu, p, {}, kept);
  return y;
}

Tensor gated_activation(const Tensor& gate_up, int64_t kind) {
  EXL3_CHECK_CPU("gated_activation", gate_up);
  GatedActivationParams p = gated_activation_params<float>(gate_up, kind);
  Tensor y = allocate(gate_up, {p.rows, p.dim});
  p.y = data_mut<float>(y);
  launch("gated_activation", gated_activation_cpu, p, {gate_up, y});
  return y;
}

Tensor embedding(const Tensor& ids, const Tensor& table, double scale) {
  EXL3_CHECK_CPU("embedding", table);
  EmbeddingParams p = embedding_params<float>(ids, table, scale);
  Tensor y = allocate(table, {p.rows, p.dim});
  p.y = data_mut<float>(y);
  launch("embedding", embedding_cpu, p, {ids, table, y});
  return y;
}

Tensor argmax(const Tensor& logits, int64_t valid) {
  EXL3_CHECK_CPU("argmax", logits);
  ArgmaxParams p = argmax_params<float>(logits, valid);
  Tensor index = torch::stable::new_empty(logits, {p.rows}, ScalarType::Long);
  p.index = data_mut<int64_t>(index);
  launch("argmax", argmax_cpu, p, {logits, index});
  return index;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("gated_activation", TORCH_BOX(&gated_activation));
  m.impl("embedding", TORCH_BOX(&embedding));
  m.impl("argmax", TORCH_BOX(&argmax));
}

}  // namespace exl3::bind
