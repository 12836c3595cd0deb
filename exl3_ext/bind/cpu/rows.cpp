// Bindings of the row-wise ops: norm, activation, embedding, argmax.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>

#include "bind/cpu/launch.h"
#include "exl3/activation.h"
#include "exl3/embedding.h"
#include "exl3/norm.h"
#include "exl3/sampling.h"

namespace exl3::bind {
namespace {

// A float32 CPU matrix whose rows may lie apart; returns the distance between them.
int64_t checked_row_stride(const char* op, const Tensor& x) {
  EXL3_CHECK_CPU(op, x);
  EXL3_CHECK_DTYPE(op, x, Float);
  EXL3_CHECK_DIM(op, x, 2);
  EXL3_CHECK(op, x.size(1) <= 1 || x.stride(1) == 1, "x.stride(1) is ", x.stride(1),
             ", expected 1");
  EXL3_CHECK(op, x.size(0) <= 1 || x.stride(0) >= x.size(1), "rows of x overlap");
  return x.size(0) > 1 ? x.stride(0) : x.size(1);
}

Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                double weight_offset) {
  const char* op = "rms_norm";
  EXL3_CHECK_CPU(op, x);
  EXL3_CHECK_DTYPE(op, x, Float);
  EXL3_CHECK(op, x.dim() >= 1, "x has no dims");
  RmsNormParams p{};
  p.dim = x.size(x.dim() - 1);
  p.rows = p.dim ? x.numel() / p.dim : 0;
  p.x_stride = p.dim;
  if (x.dim() == 2)
    p.x_stride = checked_row_stride(op, x);
  else
    EXL3_CHECK_CONTIGUOUS(op, x);
  Tensor y = torch::stable::new_empty(x, x.sizes());
  std::vector<Tensor> kept{x, y};
  if (weight) {
    EXL3_CHECK_ARG(op, *weight, Float);
    EXL3_CHECK_DIM(op, *weight, 1);
    EXL3_CHECK_SIZE(op, *weight, 0, p.dim);
    kept.push_back(*weight);
    p.weight = data<float>(*weight);
  }
  p.x = data<float>(x);
  p.y = data_mut<float>(y);
  p.eps = static_cast<float>(eps);
  p.weight_offset = static_cast<float>(weight_offset);
  launch(op, rms_norm_cpu, p, {}, kept);
  return y;
}

Tensor gated_activation(const Tensor& gate_up, int64_t kind) {
  const char* op = "gated_activation";
  GatedActivationParams p{};
  p.x_stride = checked_row_stride(op, gate_up);
  EXL3_CHECK(op, gate_up.size(1) % 2 == 0, "gate_up.size(1) is ", gate_up.size(1),
             ", expected an even number");
  EXL3_CHECK(op, kind >= 0 && kind < kActivations, "kind is ", kind);
  p.rows = gate_up.size(0);
  p.dim = gate_up.size(1) / 2;
  const int64_t sizes[] = {p.rows, p.dim};
  Tensor y = torch::stable::new_empty(gate_up, {sizes, 2});
  p.gate_up = data<float>(gate_up);
  p.y = data_mut<float>(y);
  p.kind = static_cast<Activation>(kind);
  launch(op, gated_activation_cpu, p, {gate_up, y});
  return y;
}

Tensor embedding(const Tensor& ids, const Tensor& table, double scale) {
  const char* op = "embedding";
  EXL3_CHECK_ARG(op, ids, Long);
  EXL3_CHECK_DIM(op, ids, 1);
  EXL3_CHECK_CPU(op, table);
  EXL3_CHECK_DIM(op, table, 2);
  EXL3_CHECK_CONTIGUOUS(op, table);
  EXL3_CHECK(op, is_float(table), "table must be float32, float16 or bfloat16");
  EmbeddingParams p{};
  p.rows = ids.size(0);
  p.vocab = table.size(0);
  p.dim = table.size(1);
  const int64_t sizes[] = {p.rows, p.dim};
  Tensor y = torch::stable::new_empty(table, {sizes, 2}, ScalarType::Float);
  p.ids = data<int64_t>(ids);
  p.table = data<void>(table);
  p.y = data_mut<float>(y);
  p.dtype = dtype_of(table);
  p.scale = static_cast<float>(scale);
  launch(op, embedding_cpu, p, {ids, table, y});
  return y;
}

Tensor argmax(const Tensor& logits, int64_t valid) {
  const char* op = "argmax";
  ArgmaxParams p{};
  p.x_stride = checked_row_stride(op, logits);
  EXL3_CHECK(op, valid >= 1 && valid <= logits.size(1), "valid is ", valid, ", expected 1..",
             logits.size(1));
  p.rows = logits.size(0);
  p.valid = valid;
  const int64_t sizes[] = {p.rows};
  Tensor index = torch::stable::new_empty(logits, {sizes, 1}, ScalarType::Long);
  p.x = data<float>(logits);
  p.index = data_mut<int64_t>(index);
  launch(op, argmax_cpu, p, {logits, index});
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
