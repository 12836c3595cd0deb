// Work of the low-rank addition inside one task.
#pragma once
#include "exl3/low_rank.h"

namespace exl3 {

constexpr int kLowRankRows = 4;          // of a task, so that weights are read once for them
constexpr int64_t kLowRankRanks = 4;     // of one task of inner products
constexpr int64_t kLowRankColumns = 64;  // of y that one task adds to

// Inner products of rows [row, row + rows) with ranks [rank, rank + ranks) of one part.
struct LowRankInner {
  int64_t row, rank;
  int rows, part, ranks;
};

// Columns [column, column + count) of rows [row, row + rows), for the parts [first, last) of one
// target; `column` counts from their start.
struct LowRankBlock {
  int64_t row, column, count;
  int rows, first, last;
};

// Rows of a task that a part applies to: their numbers from `row` on; returns how many.
static inline int active_rows(const LowRankParams& p, const LowRankPart& part, int64_t row,
                              int rows, int* active) {
  int n = 0;
  for (int i = 0; i < rows; ++i) {
    if (p.mask[(row + i) * p.owners + part.owner] != 0.0f) active[n++] = i;
  }
  return n;
}

namespace generic {
void low_rank_inner(const LowRankParams& p, const LowRankInner& t);
void low_rank_block(const LowRankParams& p, const LowRankBlock& b);
}  // namespace generic
namespace avx2 {
void low_rank_inner(const LowRankParams& p, const LowRankInner& t);
void low_rank_block(const LowRankParams& p, const LowRankBlock& b);
}  // namespace avx2
namespace avx512 {
void low_rank_inner(const LowRankParams& p, const LowRankInner& t);
void low_rank_block(const LowRankParams& p, const LowRankBlock& b);
}  // namespace avx512

}  // namespace exl3
