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
#include "cpu/linear_select.h"

namespace exl3::bind {
namespace {

using Tensors = std::vector<Tensor>;
using OptionalTensors = std::vector<std::optional<Tensor>>;
using Ints = std::vector<int64_t>;

struct Group {
  const Tensors& planes;
  const Tensors& suh;
  const Tensors& svh;
  const OptionalTensors& bias;
  const Ints& codebooks;
  const Ints& out_features;
};

struct Norm {
  const std::optional<Tensor>& weight;
  double eps, offset;
};

// float32 CPU matrix with contiguous rows; rows may be further apart.
void check_rows(const char* op, const Tensor& t, const char* name) {
  EXL3_CHECK(op, t.is_cpu(), name, " is not on the CPU");
  EXL3_CHECK(op, t.scalar_type() == ScalarType::Float, name, " has dtype ",
             torch::headeronly::toString(t.scalar_type()), ", expected Float");
  EXL3_CHECK(op, t.dim() == 2, name, " has ", t.dim(), " dims, expected 2");
  EXL3_CHECK(op, t.stride(1) == 1 || t.size(1) <= 1, name, " has a column stride of ", t.stride(1),
             ", expected 1");
}

LinearWeightRef weight_ref(const char* op, const Group& group, size_t i, int64_t k, Tensors* kept) {
  const Tensor &planes = group.planes[i], &suh = group.suh[i], &svh = group.svh[i];
  EXL3_CHECK_ARG(op, planes, Short);
  EXL3_CHECK_DIM(op, planes, 3);
  EXL3_CHECK_ARG(op, suh, Half);
  EXL3_CHECK_ARG(op, svh, Half);
  EXL3_CHECK_DIM(op, suh, 1);
  EXL3_CHECK_DIM(op, svh, 1);
  EXL3_CHECK_SIZE(op, suh, 0, k);
  const int64_t n = svh.size(0), bits = planes.size(2) / 16;
  EXL3_CHECK(op, n % kHadamardDim == 0, "svh.size(0) is ", n, ", expected a multiple of 128");
  EXL3_CHECK_SIZE(op, planes, 0, n / kTileDim);
  EXL3_CHECK_SIZE(op, planes, 1, k / kTileDim);
  EXL3_CHECK(op, bits >= 1 && bits <= 8 && planes.size(2) == 16 * bits, "planes.size(2) is ",
             planes.size(2), ", expected 16 * bits with bits 1..8");
  const int64_t out = group.out_features[i], codebook = group.codebooks[i];
  EXL3_CHECK(op, out > n - kHadamardDim && out <= n, "out_features is ", out, ", expected ",
             n - kHadamardDim + 1, "..", n);
  EXL3_CHECK(op, codebook >= 0 && codebook < kCodebooks, "codebook is ", codebook);
  LinearWeightRef ref{};
  ref.planes = data<uint16_t>(planes);
  ref.suh = data<half_bits>(suh);
  ref.svh = data<half_bits>(svh);
  ref.n = n;
  ref.out_features = out;
  ref.bits = static_cast<int>(bits);
  ref.codebook = static_cast<Codebook>(codebook);
  kept->insert(kept->end(), {planes, suh, svh});
  if (group.bias[i].has_value()) {
    const Tensor& bias = *group.bias[i];
    EXL3_CHECK_ARG(op, bias, Float);
    EXL3_CHECK_DIM(op, bias, 1);
    EXL3_CHECK_SIZE(op, bias, 0, out);
    ref.bias = data<float>(bias);
    kept->push_back(bias);
  }
  return ref;
}

// Everything but y and the residual.
LinearParams fill(const char* op, const Tensor& x, const Group& group, const Norm& norm,
                  int64_t activation, Tensors* kept) {
  const size_t count = group.planes.size();
  EXL3_CHECK(op, count >= 1 && count <= kLinearGroup, "got ", count, " weights, expected 1..",
             kLinearGroup);
  EXL3_CHECK(op,
             group.suh.size() == count && group.svh.size() == count && group.bias.size() == count &&
                 group.codebooks.size() == count && group.out_features.size() == count,
             "planes, suh, svh, bias, codebooks and out_features differ in length");
  check_rows(op, x, "x");
  LinearParams p{};
  p.m = x.size(0);
  p.in_features = x.size(1);
  p.k = group.suh[0].size(0);
  EXL3_CHECK(op, p.k % kHadamardDim == 0, "suh.size(0) is ", p.k, ", expected a multiple of 128");
  EXL3_CHECK(op, p.in_features > p.k - kHadamardDim && p.in_features <= p.k, "x.size(1) is ",
             p.in_features, ", expected ", p.k - kHadamardDim + 1, "..", p.k);
  p.x = data<float>(x);
  p.x_stride = x.stride(0);
  kept->push_back(x);
  p.count = static_cast<int>(count);
  for (size_t i = 0; i < count; ++i) p.w[i] = weight_ref(op, group, i, p.k, kept);
  if (norm.weight.has_value()) {
    const Tensor& norm_weight = *norm.weight;
    EXL3_CHECK_ARG(op, norm_weight, Float);
    EXL3_CHECK_DIM(op, norm_weight, 1);
    EXL3_CHECK_SIZE(op, norm_weight, 0, p.in_features);
    p.norm_weight = data<float>(norm_weight);
    p.norm_eps = static_cast<float>(norm.eps);
    p.norm_offset = static_cast<float>(norm.offset);
    kept->push_back(norm_weight);
  }
  EXL3_CHECK(op, activation >= -1 && activation <= 3, "activation is ", activation);
  EXL3_CHECK(op, activation < 0 || (count == 2 && p.w[0].out_features == p.w[1].out_features),
             "an activation needs two weights, gate and up, of one size");
  p.activation = static_cast<int>(activation);
  return p;
}

int64_t columns_of(const LinearParams& p) {
  if (p.activation >= 0) return p.w[0].out_features;
  int64_t columns = 0;
  for (int i = 0; i < p.count; ++i) columns += p.w[i].out_features;
  return columns;
}

void finish(const char* op, LinearParams* p, const Tensor& x, Tensors* kept) {
  // One line more than needed, to align it.
  p->workspace_bytes = linear_workspace_bytes(*p);
  const Tensor workspace = torch::stable::new_empty(x, {p->workspace_bytes + 64}, ScalarType::Byte);
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
  const Tensor y = torch::stable::new_empty(x, {p.m, columns});
  p.y = data_mut<float>(y);
  p.y_stride = columns;
  kept.push_back(y);
  if (residual.has_value()) {
    check_rows(op, *residual, "residual");
    EXL3_CHECK_SIZE(op, *residual, 0, p.m);
    EXL3_CHECK_SIZE(op, *residual, 1, columns);
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
  check_rows(op, residual, "residual");
  EXL3_CHECK_SIZE(op, residual, 0, p.m);
  EXL3_CHECK_SIZE(op, residual, 1, columns_of(p));
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
