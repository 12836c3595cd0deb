// Argument checks of exl3::linear, the same on every device; the dtype of activations is checked by
// each device's binding.
#pragma once
#include <optional>
#include <vector>

#include "bind/check.h"
#include "exl3/linear.h"

namespace exl3::bind {

using Tensors = std::vector<Tensor>;
using OptionalTensors = std::vector<std::optional<Tensor>>;
using Ints = std::vector<int64_t>;

struct WeightLists {
  const Tensors& planes;
  const Tensors& suh;
  const Tensors& svh;
  const OptionalTensors& bias;
  const Ints& codebooks;
  const Ints& out_features;
};

struct NormArgument {
  const std::optional<Tensor>& weight;
  double eps, offset;
};

#define EXL3_CHECK_PARAMETER(op, t, dtype, x) \
  do {                                        \
    EXL3_CHECK_SAME_DEVICE(op, t, x);         \
    EXL3_CHECK_DTYPE(op, t, dtype);           \
    EXL3_CHECK_CONTIGUOUS(op, t);             \
  } while (0)

// Matrix with contiguous rows; rows may be further apart.
inline void check_matrix(const char* op, const Tensor& t, const char* name) {
  EXL3_CHECK(op, t.dim() == 2, name, " has ", t.dim(), " dims, expected 2");
  EXL3_CHECK(op, t.stride(1) == 1 || t.size(1) <= 1, name, " has a column stride of ", t.stride(1),
             ", expected 1");
}

inline LinearWeightRef weight_ref(const char* op, const WeightLists& lists, size_t i,
                                  const Tensor& x, int64_t k) {
  const Tensor &planes = lists.planes[i], &suh = lists.suh[i], &svh = lists.svh[i];
  EXL3_CHECK_PARAMETER(op, planes, Short, x);
  EXL3_CHECK_DIM(op, planes, 3);
  EXL3_CHECK_PARAMETER(op, suh, Half, x);
  EXL3_CHECK_PARAMETER(op, svh, Half, x);
  EXL3_CHECK_DIM(op, suh, 1);
  EXL3_CHECK_DIM(op, svh, 1);
  EXL3_CHECK_SIZE(op, suh, 0, k);
  const int64_t n = svh.size(0), bits = planes.size(2) / 16;
  EXL3_CHECK(op, n % kHadamardDim == 0, "svh.size(0) is ", n, ", expected a multiple of 128");
  EXL3_CHECK_SIZE(op, planes, 0, n / kTileDim);
  EXL3_CHECK_SIZE(op, planes, 1, k / kTileDim);
  EXL3_CHECK(op, bits >= 1 && bits <= 8 && planes.size(2) == 16 * bits, "planes.size(2) is ",
             planes.size(2), ", expected 16 * bits with bits 1..8");
  const int64_t out = lists.out_features[i], codebook = lists.codebooks[i];
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
  if (lists.bias[i].has_value()) {
    const Tensor& bias = *lists.bias[i];
    EXL3_CHECK_PARAMETER(op, bias, Float, x);
    EXL3_CHECK_DIM(op, bias, 1);
    EXL3_CHECK_SIZE(op, bias, 0, out);
    ref.bias = data<float>(bias);
  }
  return ref;
}

inline void fill_group(const char* op, const Tensor& x, const WeightLists& lists,
                       const NormArgument& norm, int64_t activation, LinearGroup* p) {
  const size_t count = lists.planes.size();
  EXL3_CHECK(op, count >= 1 && count <= kLinearGroup, "got ", count, " weights, expected 1..",
             kLinearGroup);
  EXL3_CHECK(op,
             lists.suh.size() == count && lists.svh.size() == count && lists.bias.size() == count &&
                 lists.codebooks.size() == count && lists.out_features.size() == count,
             "planes, suh, svh, bias, codebooks and out_features differ in length");
  check_matrix(op, x, "x");
  p->m = x.size(0);
  p->in_features = x.size(1);
  p->k = lists.suh[0].size(0);
  EXL3_CHECK(op, p->k % kHadamardDim == 0, "suh.size(0) is ", p->k, ", expected a multiple of 128");
  EXL3_CHECK(op, p->in_features > p->k - kHadamardDim && p->in_features <= p->k, "x.size(1) is ",
             p->in_features, ", expected ", p->k - kHadamardDim + 1, "..", p->k);
  p->count = static_cast<int>(count);
  for (size_t i = 0; i < count; ++i) p->w[i] = weight_ref(op, lists, i, x, p->k);
  if (norm.weight.has_value()) {
    const Tensor& norm_weight = *norm.weight;
    EXL3_CHECK_PARAMETER(op, norm_weight, Float, x);
    EXL3_CHECK_DIM(op, norm_weight, 1);
    EXL3_CHECK_SIZE(op, norm_weight, 0, p->in_features);
    p->norm_weight = data<float>(norm_weight);
    p->norm_eps = static_cast<float>(norm.eps);
    p->norm_offset = static_cast<float>(norm.offset);
  }
  EXL3_CHECK(op, activation >= -1 && activation <= 3, "activation is ", activation);
  EXL3_CHECK(op, activation < 0 || (count == 2 && p->w[0].out_features == p->w[1].out_features),
             "an activation needs two weights, gate and up, of one size");
  p->activation = static_cast<int>(activation);
}

inline int64_t columns_of(const LinearGroup& p) {
  if (p.activation >= 0) return p.w[0].out_features;
  int64_t columns = 0;
  for (int i = 0; i < p.count; ++i) columns += p.w[i].out_features;
  return columns;
}

inline void check_residual(const char* op, const Tensor& residual, const LinearGroup& p) {
  check_matrix(op, residual, "residual");
  EXL3_CHECK_SIZE(op, residual, 0, p.m);
  EXL3_CHECK(op, residual.size(1) == columns_of(p), "residual.size(1) is ", residual.size(1),
             ", expected ", columns_of(p), " (columns of the result)");
}

}  // namespace exl3::bind
