// Splits a large product over threads: first the rows of x (conversion), then the columns, and the
// rows too where the columns are too few. The sum of an element has one order: results do not
// depend on the split.
#include "exl3/gemm_large.h"

#include <cstring>

#include "cpu/table.h"
#include "cpu/threads.h"

namespace exl3 {
namespace {

constexpr int64_t kRowTile = 16;
constexpr int64_t kStripPair = 2;     // 32 columns: two tiles of an AMX product
constexpr int64_t kTasksAThread = 2;  // few: a task reads all its rows of x once per 12 strips
constexpr int64_t kLeastRows = 128;   // of a part; every part decodes all of its columns

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void clear(const GemmLargeParams& p) {
  for (int64_t row = 0; row < p.m; ++row) {
    std::memset(p.y + row * p.y_stride, 0, static_cast<size_t>(p.n) * sizeof(float));
  }
}

// Rows [begin, end), begin a multiple of 16.
GemmLargeParams rows_of(const GemmLargeParams& p, int64_t begin, int64_t end) {
  GemmLargeParams part = p;
  part.m = end - begin;
  part.x += begin * p.x_stride;
  part.y += begin * p.y_stride;
  part.workspace = static_cast<unsigned char*>(p.workspace) + begin * p.k * kGemmLargeRowBytes;
  return part;
}

}  // namespace

// Room for x in float32 or bfloat16, rows padded to whole tiles.
int64_t gemm_large_workspace(int64_t m, int64_t k) {
  return ceil_div(m, kRowTile) * kRowTile * k * kGemmLargeRowBytes;
}

Status gemm_large_cpu(const GemmLargeParams& p) {
  if (p.bits < 1 || p.bits > 8 || p.k % kHadamardDim || p.n % kHadamardDim)
    return Status::kBadArgument;
  if (p.m == 0 || p.n == 0) return Status::kOk;
  if (p.k == 0) {
    clear(p);
    return Status::kOk;
  }
  const KernelTable& table = kernels();
  const int64_t groups = ceil_div(p.m, kRowTile);
  if (table.gemm_large_inputs) {
    parallel_for(groups, 1,
                 [&](int64_t begin, int64_t end, int) { table.gemm_large_inputs(p, begin, end); });
  }
  const int64_t pairs = p.n / (kTileDim * kStripPair), tasks = kTasksAThread * num_threads();
  const int64_t columns = pairs < tasks ? pairs : tasks;
  const int64_t most_parts = ceil_div(p.m, kLeastRows), wanted = ceil_div(tasks, pairs);
  const int64_t parts = wanted < most_parts ? wanted : most_parts;
  parallel_for(columns * parts, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t part = i / columns, column = i % columns;
      const int64_t last = groups * (part + 1) / parts * kRowTile;
      const GemmLargeParams rows =
          rows_of(p, groups * part / parts * kRowTile, last < p.m ? last : p.m);
      table.gemm_large_strips(rows, pairs * column / columns * kStripPair,
                              pairs * (column + 1) / columns * kStripPair);
    }
  });
  return Status::kOk;
}

}  // namespace exl3
