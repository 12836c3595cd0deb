// Bindings of the row-wise ops: norm, activation, embedding, argmax, sampling.
#include <torch/csrc/stable/library.h>

#include "bind/cuda/guard.h"
#include "bind/rows_params.h"

namespace exl3::bind {
namespace {

bool is_half(const Tensor& x) { return x.scalar_type() == ScalarType::Half; }

template <class T>
Tensor rms_norm_of(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                   double weight_offset) {
  RmsNorm<T> p = rms_norm_params<T>(x, weight, eps, weight_offset);
  Tensor y = torch::stable::new_empty(x, x.sizes());
  p.y = data_mut<T>(y);
  CudaLaunch(x).run("rms_norm", rms_norm_cuda<T>, p);
  return y;
}

Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                double weight_offset) {
  EXL3_CHECK_CUDA("rms_norm", x);
  return is_half(x) ? rms_norm_of<half_bits>(x, weight, eps, weight_offset)
                    : rms_norm_of<float>(x, weight, eps, weight_offset);
}

template <class T>
Tensor gated_activation_of(const Tensor& gate_up, int64_t kind) {
  GatedActivation<T> p = gated_activation_params<T>(gate_up, kind);
  Tensor y = torch::stable::new_empty(gate_up, {p.rows, p.dim});
  p.y = data_mut<T>(y);
  CudaLaunch(gate_up).run("gated_activation", gated_activation_cuda<T>, p);
  return y;
}

Tensor gated_activation(const Tensor& gate_up, int64_t kind) {
  EXL3_CHECK_CUDA("gated_activation", gate_up);
  return is_half(gate_up) ? gated_activation_of<half_bits>(gate_up, kind)
                          : gated_activation_of<float>(gate_up, kind);
}

template <class T>
Tensor embedding_of(const Tensor& ids, const Tensor& table, double scale, ScalarType out) {
  Embedding<T> p = embedding_params<T>(ids, table, scale);
  Tensor y = torch::stable::new_empty(table, {p.rows, p.dim}, out);
  p.y = data_mut<T>(y);
  CudaLaunch(table).run("embedding", embedding_cuda<T>, p);
  return y;
}

Tensor embedding(const Tensor& ids, const Tensor& table, double scale) {
  EXL3_CHECK_CUDA("embedding", table);
  return table.scalar_type() == ScalarType::Float
             ? embedding_of<float>(ids, table, scale, ScalarType::Float)
             : embedding_of<half_bits>(ids, table, scale, ScalarType::Half);
}

template <class T>
Tensor argmax_of(const Tensor& logits, int64_t valid) {
  Argmax<T> p = argmax_params<T>(logits, valid);
  Tensor index = torch::stable::new_empty(logits, {p.rows}, ScalarType::Long);
  p.index = data_mut<int64_t>(index);
  CudaLaunch(logits).run("argmax", argmax_cuda<T>, p);
  return index;
}

Tensor argmax(const Tensor& logits, int64_t valid) {
  EXL3_CHECK_CUDA("argmax", logits);
  return is_half(logits) ? argmax_of<half_bits>(logits, valid) : argmax_of<float>(logits, valid);
}

// A table of structs, as bytes.
template <class T>
T* structs(const Tensor& t, const Tensor& near, const char* name, int64_t* count) {
  const char* op = "sample";
  EXL3_CHECK_BESIDE(op, t, near, Byte);
  constexpr int64_t kSize = sizeof(T);
  EXL3_CHECK(op, t.numel() % kSize == 0, name, " has ", t.numel(),
             " bytes, expected a multiple of ", kSize);
  EXL3_CHECK(op, reinterpret_cast<uintptr_t>(t.data_ptr()) % 8 == 0, name, " is not aligned");
  *count = t.numel() / kSize;
  return reinterpret_cast<T*>(data_mut<uint8_t>(t));
}

Tensor sample(const Tensor& logits, int64_t valid, const Tensor& plans, const Tensor& edits,
              const Tensor& masks) {
  const char* op = "sample";
  EXL3_CHECK_CUDA(op, logits);
  SampleParams p{};
  p.x_stride = checked_row_stride<float>(op, logits);
  EXL3_CHECK(op, valid >= 1 && valid <= logits.size(1), "valid is ", valid, ", expected 1..",
             logits.size(1));
  p.rows = logits.size(0);
  p.valid = valid;
  p.x = data_mut<float>(logits);
  int64_t plan_count = 0;
  p.plans = structs<SampleRow>(plans, logits, "plans", &plan_count);
  EXL3_CHECK(op, plan_count == p.rows, "plans has ", plan_count, " rows, expected ", p.rows);
  p.edits = structs<SampleEdit>(edits, logits, "edits", &p.n_edits);
  EXL3_CHECK_BESIDE(op, masks, logits, Int);
  EXL3_CHECK_DIM(op, masks, 2);
  EXL3_CHECK_SIZE(op, masks, 1, (valid + 31) / 32);
  p.masks = reinterpret_cast<const uint32_t*>(data<int32_t>(masks));
  p.n_masks = masks.size(0);
  Tensor index = torch::stable::new_empty(logits, {p.rows}, ScalarType::Long);
  p.index = data_mut<int64_t>(index);
  CudaLaunch(logits).run(op, sample_cuda, p);
  return index;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("gated_activation", TORCH_BOX(&gated_activation));
  m.impl("embedding", TORCH_BOX(&embedding));
  m.impl("argmax", TORCH_BOX(&argmax));
  m.impl("sample", TORCH_BOX(&sample));
}

}  // namespace exl3::bind
