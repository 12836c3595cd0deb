#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

constexpr int kMaxLowRankParts = 16;

// y[row, start : start + n] += mask[row, owner] * (x[row] a^T) b, summed over the parts.
struct LowRankPart {
  const float* a;  // [rank, k] row-major
  const float* b;  // [rank, n] row-major
  int64_t rank, n;
  int64_t start;       // first column of y
  int64_t owner;       // column of mask
  int64_t first_rank;  // ranks of the parts before this one
};

// Parts of one target (same start and n) follow each other.
struct LowRankParams {
  const float* x;     // [rows, k], rows x_stride apart
  float* y;           // rows y_stride apart, added to
  const float* mask;  // [rows, owners] row-major; 0: the part does not touch the row
  float* inner;       // [rows, ranks] workspace
  int64_t rows, k, x_stride, y_stride, owners;
  int64_t ranks;  // of all parts together
  int parts;
  LowRankPart part[kMaxLowRankParts];
};

Status low_rank_add_cpu(const LowRankParams& p);

}  // namespace exl3
