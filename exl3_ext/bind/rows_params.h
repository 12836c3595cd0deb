// Argument checks of the row-wise ops, the same on every device. T: the type of activations.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <type_traits>

#include "bind/check.h"
#include "exl3/activation.h"
#include "exl3/embedding.h"
#include "exl3/norm.h"
#include "exl3/sampling.h"

namespace exl3::bind {

// Tensor that must lie where `x` lies, contiguous, of one dtype.
#define EXL3_CHECK_BESIDE(op, t, x, dtype) \
  do {                                     \
    EXL3_CHECK_SAME_DEVICE(op, t, x);      \
    EXL3_CHECK_DTYPE(op, t, dtype);        \
    EXL3_CHECK_CONTIGUOUS(op, t);          \
  } while (0)

template <class T>
void check_activation_dtype(const char* op, const Tensor& x, const char* name) {
  constexpr bool kFloat = std::is_same_v<T, float>;
  EXL3_CHECK(op, x.scalar_type() == (kFloat ? ScalarType::Float : ScalarType::Half), name,
             " has dtype ", torch::headeronly::toString(x.scalar_type()), ", expected ",
             kFloat ? "Float" : "Half");
}

// A matrix whose rows may lie apart; returns the distance between them.
template <class T>
int64_t checked_row_stride(const char* op, const Tensor& x) {
  check_activation_dtype<T>(op, x, "x");
  EXL3_CHECK_DIM(op, x, 2);
  EXL3_CHECK(op, x.size(1) <= 1 || x.stride(1) == 1, "x.stride(1) is ", x.stride(1),
             ", expected 1");
  EXL3_CHECK(op, x.size(0) <= 1 || x.stride(0) >= x.size(1), "rows of x overlap");
  return x.size(0) > 1 ? x.stride(0) : x.size(1);
}

template <class T>
RmsNorm<T> rms_norm_params(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                           double weight_offset) {
  const char* op = "rms_norm";
  check_activation_dtype<T>(op, x, "x");
  EXL3_CHECK(op, x.dim() >= 1, "x has no dims");
  RmsNorm<T> p{};
  p.dim = x.size(x.dim() - 1);
  p.rows = p.dim ? x.numel() / p.dim : 0;
  p.x_stride = p.dim;
  if (x.dim() == 2)
    p.x_stride = checked_row_stride<T>(op, x);
  else
    EXL3_CHECK_CONTIGUOUS(op, x);
  if (weight) {
    EXL3_CHECK_BESIDE(op, *weight, x, Float);
    EXL3_CHECK_DIM(op, *weight, 1);
    EXL3_CHECK_SIZE(op, *weight, 0, p.dim);
    p.weight = data<float>(*weight);
  }
  p.x = data<T>(x);
  p.eps = static_cast<float>(eps);
  p.weight_offset = static_cast<float>(weight_offset);
  return p;
}

template <class T>
GatedActivation<T> gated_activation_params(const Tensor& gate_up, int64_t kind) {
  const char* op = "gated_activation";
  GatedActivation<T> p{};
  p.x_stride = checked_row_stride<T>(op, gate_up);
  EXL3_CHECK(op, gate_up.size(1) % 2 == 0, "gate_up.size(1) is ", gate_up.size(1),
             ", expected an even number");
  EXL3_CHECK(op, kind >= 0 && kind < kActivations, "kind is ", kind);
  p.rows = gate_up.size(0);
  p.dim = gate_up.size(1) / 2;
  p.gate_up = data<T>(gate_up);
  p.kind = static_cast<Activation>(kind);
  return p;
}

template <class T>
Embedding<T> embedding_params(const Tensor& ids, const Tensor& table, double scale) {
  const char* op = "embedding";
  EXL3_CHECK_BESIDE(op, ids, table, Long);
  EXL3_CHECK_DIM(op, ids, 1);
  EXL3_CHECK_DIM(op, table, 2);
  EXL3_CHECK_CONTIGUOUS(op, table);
  EXL3_CHECK(op, is_float(table), "table must be float32, float16 or bfloat16");
  Embedding<T> p{};
  p.rows = ids.size(0);
  p.vocab = table.size(0);
  p.dim = table.size(1);
  p.ids = data<int64_t>(ids);
  p.table = data<void>(table);
  p.dtype = dtype_of(table);
  p.scale = static_cast<float>(scale);
  return p;
}

template <class T>
Argmax<T> argmax_params(const Tensor& logits, int64_t valid) {
  const char* op = "argmax";
  Argmax<T> p{};
  p.x_stride = checked_row_stride<T>(op, logits);
  EXL3_CHECK(op, valid >= 1 && valid <= logits.size(1), "valid is ", valid, ", expected 1..",
             logits.size(1));
  p.rows = logits.size(0);
  p.valid = valid;
  p.x = data<T>(logits);
  return p;
}

}  // namespace exl3::bind
