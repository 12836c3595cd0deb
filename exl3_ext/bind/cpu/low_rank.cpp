// Binding of the low-rank addition.
#include "exl3/low_rank.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "bind/cpu/launch.h"

namespace exl3::bind {
namespace {

constexpr const char* kOp = "low_rank_add_";

int64_t checked_rows(const Tensor& t, const char* name) {
  EXL3_CHECK(kOp, t.is_cpu(), name, " is not on the CPU");
  EXL3_CHECK(kOp, t.scalar_type() == ScalarType::Float, name, " has dtype ",
             torch::headeronly::toString(t.scalar_type()), ", expected Float");
  EXL3_CHECK(kOp, t.dim() == 2, name, " has ", t.dim(), " dims, expected 2");
  EXL3_CHECK(kOp, t.size(1) <= 1 || t.stride(1) == 1, name, ".stride(1) is ", t.stride(1),
             ", expected 1");
  EXL3_CHECK(kOp, t.size(0) <= 1 || t.stride(0) >= t.size(1), "rows of ", name, " overlap");
  return t.size(0) > 1 ? t.stride(0) : t.size(1);
}

void check_part(const LowRankParams& p, int i, const Tensor& a, const Tensor& b, int64_t columns) {
  const LowRankPart& part = p.part[i];
  EXL3_CHECK(kOp, a.is_contiguous() && b.is_contiguous(), "part ", i, " is not contiguous");
  EXL3_CHECK(kOp, part.rank >= 1 && a.size(1) == p.k, "a of part ", i, " is (", part.rank, ", ",
             a.size(1), "), expected (1 or more, ", p.k, ")");
  EXL3_CHECK(kOp, b.size(0) == part.rank, "b of part ", i, " has ", b.size(0), " rows, expected ",
             part.rank, " (the rank of a)");
  EXL3_CHECK(kOp, part.start >= 0 && part.start + part.n <= columns, "part ", i, " covers columns ",
             part.start, " to ", part.start + part.n, " of ", columns);
  EXL3_CHECK(kOp, part.owner >= 0 && part.owner < p.owners, "owner of part ", i, " is ", part.owner,
             ", mask has ", p.owners, " columns");
  if (i == 0) return;
  const LowRankPart& before = p.part[i - 1];
  const bool same = part.start == before.start && part.n == before.n;
  EXL3_CHECK(kOp, same || part.start >= before.start + before.n, "part ", i,
             " overlaps the one before it; parts come in the order of their columns");
}

void low_rank_add_(const Tensor& y, const Tensor& x, std::vector<Tensor> a, std::vector<Tensor> b,
                   std::vector<int64_t> starts, std::vector<int64_t> owners, const Tensor& mask) {
  LowRankParams p{};
  p.y_stride = checked_rows(y, "y");
  p.x_stride = checked_rows(x, "x");
  EXL3_CHECK_ARG(kOp, mask, Float);
  EXL3_CHECK_DIM(kOp, mask, 2);
  EXL3_CHECK_SIZE(kOp, mask, 0, x.size(0));
  EXL3_CHECK_SIZE(kOp, y, 0, x.size(0));
  const size_t parts = a.size();
  EXL3_CHECK(kOp, parts >= 1 && parts <= kMaxLowRankParts, parts, " parts, expected 1..",
             kMaxLowRankParts);
  EXL3_CHECK(kOp, b.size() == parts && starts.size() == parts && owners.size() == parts,
             "a, b, starts and owners have different lengths");
  p.rows = x.size(0);
  p.k = x.size(1);
  p.owners = mask.size(1);
  p.parts = static_cast<int>(parts);
  for (size_t i = 0; i < parts; ++i) {
    checked_rows(a[i], "a");
    checked_rows(b[i], "b");
    p.part[i] = {data<float>(a[i]), data<float>(b[i]), a[i].size(0), b[i].size(1),
                 starts[i],         owners[i],         p.ranks};
    check_part(p, static_cast<int>(i), a[i], b[i], y.size(1));
    p.ranks += a[i].size(0);
  }
  const Tensor inner = allocate(x, {p.rows, p.ranks});
  p.x = data<float>(x);
  p.y = data_mut<float>(y);
  p.mask = data<float>(mask);
  p.inner = data_mut<float>(inner);
  std::vector<Tensor> kept(a);
  kept.insert(kept.end(), b.begin(), b.end());
  launch(kOp, low_rank_add_cpu, p, {x, y, mask, inner}, kept);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) { m.impl("low_rank_add_", TORCH_BOX(&low_rank_add_)); }

}  // namespace exl3::bind
