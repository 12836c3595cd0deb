#include "exl3/linear.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bind/cpu/launch.h"
#include "bind/linear_params.h"
#include "cpu/linear_select.h"

namespace exl3::bind {
namespace {

void check_float(const char* op, const Tensor& t, const char* name) {
  EXL3_CHECK(op, t.is_cpu(), name, " is not on the CPU");
  EXL3_CHECK(op, t.scalar_type() == ScalarType::Float, name, " has dtype ",
             torch::headeronly::toString(t.scalar_type()), ", expected Float");
}

// Everything but y and the residual.
LinearParams fill(const char* op, const Tensor& x, const WeightLists& lists,
                  const NormArgument& norm, int64_t activation, Tensors* kept) {
  check_float(op, x, "x");
  LinearParams p{};
  fill_group(op, x, lists, norm, activation, &p);
  p.x = data<float>(x);
  p.x_stride = x.stride(0);
  kept->push_back(x);
  for (const auto* list : {&lists.planes, &lists.suh, &lists.svh}) {
    kept->insert(kept->end(), list->begin(), list->end());
  }
  for (const auto& bias : lists.bias) {
    if (bias.has_value()) kept->push_back(*bias);
  }
  if (norm.weight.has_value()) kept->push_back(*norm.weight);
  return p;
}

void finish(const char* op, LinearParams* p, const Tensor& x, Tensors* kept) {
  // One line more than needed, to align it.
  p->workspace_bytes = linear_workspace_bytes(*p);
  const Tensor workspace = allocate(x, {p->workspace_bytes / 4 + 16});
  const uintptr_t at = reinterpret_cast<uintptr_t>(workspace.data_ptr());
  p->workspace = reinterpret_cast<unsigned char*>((at + 63) / 64 * 64);
  kept->push_back(workspace);
  launch(op, linear_cpu, *p, {}, *kept);
}

Tensor linear(const Tensor& x, Tensors planes, Tensors suh, Tensors svh, OptionalTensors bias,
              Ints codebooks, Ints out_features, const std::optional<Tensor>& norm_weight,
              double norm_eps, double norm_offset, int64_t activation,
              const std::optional<Tensor>& residual) {
  const char* op = "linear";
  Tensors kept;
  LinearParams p = fill(op, x, {planes, suh, svh, bias, codebooks, out_features},
                        {norm_weight, norm_eps, norm_offset}, activation, &kept);
  const int64_t columns = columns_of(p);
  const Tensor y = allocate(x, {p.m, columns});
  p.y = data_mut<float>(y);
  p.y_stride = columns;
  kept.push_back(y);
  if (residual.has_value()) {
    check_float(op, *residual, "residual");
    check_residual(op, *residual, p);
    p.residual = data<float>(*residual);
    p.residual_stride = residual->stride(0);
    kept.push_back(*residual);
  }
  finish(op, &p, x, &kept);
  return y;
}

void linear_add_(const Tensor& residual, const Tensor& x, Tensors planes, Tensors suh, Tensors svh,
                 OptionalTensors bias, Ints codebooks, Ints out_features,
                 const std::optional<Tensor>& norm_weight, double norm_eps, double norm_offset,
                 int64_t activation) {
  const char* op = "linear_add_";
  Tensors kept;
  LinearParams p = fill(op, x, {planes, suh, svh, bias, codebooks, out_features},
                        {norm_weight, norm_eps, norm_offset}, activation, &kept);
  check_float(op, residual, "residual");
  check_residual(op, residual, p);
  p.residual = data<float>(residual);
  p.residual_stride = residual.stride(0);
  p.y = data_mut<float>(residual);
  p.y_stride = residual.stride(0);
  kept.push_back(residual);
  finish(op, &p, x, &kept);
}

// Asks for 2 MB pages under the whole ones of a tensor. A wish: no system need grant it.
void advise_huge_pages(const Tensor& x) {
  EXL3_CHECK_CPU("advise_huge_pages", x);
  EXL3_CHECK_CONTIGUOUS("advise_huge_pages", x);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t start = reinterpret_cast<uintptr_t>(x.data_ptr());
  const uintptr_t first = (start + kPage - 1) / kPage * kPage;
  const uintptr_t last =
      (start + static_cast<uintptr_t>(x.numel()) * x.element_size()) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// For tests: the kernel and the largest quantised activation.
std::tuple<int64_t, int64_t> select(int64_t isa, int64_t codebook, int64_t bits, int64_t m) {
  const LinearChoice choice =
      linear_select(static_cast<Isa>(isa), static_cast<Codebook>(codebook), bits, m);
  return {static_cast<int64_t>(choice.kernel), choice.q_max};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("linear_select", TORCH_BOX(&select));
  m.impl("advise_huge_pages", TORCH_BOX(&advise_huge_pages));
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_add_", TORCH_BOX(&linear_add_));
}

}  // namespace exl3::bind
