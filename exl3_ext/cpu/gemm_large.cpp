// Splits a large product over threads: first the rows of x (conversion), then the columns.
#include "exl3/gemm_large.h"

#include <cstring>

#include "cpu/table.h"
#include "cpu/threads.h"

namespace exl3 {
namespace {

constexpr int64_t kRowTile = 16;
constexpr int64_t kStripsPerTask = 2;  // 32 columns: two tiles of an AMX product

constexpr int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

}  // namespace

// Room for x in float32 or bfloat16, rows padded to whole tiles.
int64_t gemm_large_workspace(int64_t m, int64_t k) {
  return round_up(m, kRowTile) * k * static_cast<int64_t>(sizeof(float));
}

Status gemm_large_cpu(const GemmLargeParams& p) {
  if (p.bits < 1 || p.bits > 8 || p.k % kHadamardDim || p.n % kHadamardDim)
    return Status::kBadArgument;
  if (p.m == 0 || p.n == 0) return Status::kOk;
  if (p.k == 0) {
    for (int64_t row = 0; row < p.m; ++row) {
      std::memset(p.y + row * p.y_stride, 0, static_cast<size_t>(p.n) * sizeof(float));
    }
    return Status::kOk;
  }
  const KernelTable& table = kernels();
  if (table.gemm_large_inputs) {
    parallel_for(round_up(p.m, kRowTile) / kRowTile, 1,
                 [&](int64_t begin, int64_t end, int) { table.gemm_large_inputs(p, begin, end); });
  }
  parallel_for(p.n / (kTileDim * kStripsPerTask), 1, [&](int64_t begin, int64_t end, int) {
    table.gemm_large_strips(p, begin * kStripsPerTask, end * kStripsPerTask);
  });
  return Status::kOk;
}

}  // namespace exl3
