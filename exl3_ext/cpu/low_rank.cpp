// Low-rank additions: two fork-joins, first all inner products x a^T, then blocks of columns of y.
// Every sum is made in one order, whatever rows come together: a row's result depends on nothing
// but the row and its parts.
#include "cpu/low_rank.h"

#include "cpu/table.h"
#include "cpu/threads.h"

namespace exl3 {
namespace {

constexpr int64_t kGrain = 16384;  // multiply-adds worth a task

int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

bool new_target(const LowRankParams& p, int i) {
  return i == 0 || p.part[i].start != p.part[i - 1].start;
}

int rows_from(const LowRankParams& p, int64_t row) {
  return p.rows - row < kLowRankRows ? static_cast<int>(p.rows - row) : kLowRankRows;
}

LowRankInner find_inner(const LowRankParams& p, int64_t row, int64_t block) {
  LowRankInner t{};
  t.row = row;
  t.rows = rows_from(p, row);
  for (t.part = 0; t.part < p.parts - 1; ++t.part) {
    const int64_t blocks = blocks_of(p.part[t.part].rank, kLowRankRanks);
    if (block < blocks) break;
    block -= blocks;
  }
  t.rank = block * kLowRankRanks;
  const int64_t left = p.part[t.part].rank - t.rank;
  t.ranks = static_cast<int>(left < kLowRankRanks ? left : kLowRankRanks);
  return t;
}

LowRankBlock find_block(const LowRankParams& p, int64_t row, int64_t block) {
  LowRankBlock b{};
  b.row = row;
  b.rows = rows_from(p, row);
  for (;;) {
    b.last = b.first + 1;
    while (b.last < p.parts && !new_target(p, b.last)) ++b.last;
    const int64_t n = p.part[b.first].n, blocks = blocks_of(n, kLowRankColumns);
    if (block < blocks || b.last == p.parts) {
      b.column = block * kLowRankColumns;
      b.count = n - b.column < kLowRankColumns ? n - b.column : kLowRankColumns;
      return b;
    }
    block -= blocks;
    b.first = b.last;
  }
}

}  // namespace

Status low_rank_add_cpu(const LowRankParams& p) {
  if (p.rows < 1 || p.parts < 1) return Status::kOk;
  const KernelTable& k = kernels();
  int64_t inner_blocks = 0, column_blocks = 0;
  for (int i = 0; i < p.parts; ++i) {
    inner_blocks += blocks_of(p.part[i].rank, kLowRankRanks);
    if (new_target(p, i)) column_blocks += blocks_of(p.part[i].n, kLowRankColumns);
  }
  const int64_t row_blocks = blocks_of(p.rows, kLowRankRows);
  const int64_t together = p.rows < kLowRankRows ? p.rows : kLowRankRows;
  parallel_for(row_blocks * inner_blocks, kGrain / (p.k * kLowRankRanks * together + 1) + 1,
               [&](int64_t begin, int64_t end, int) {
                 for (int64_t at = begin; at < end; ++at) {
                   const int64_t row = at / inner_blocks * kLowRankRows;
                   k.low_rank_inner(p, find_inner(p, row, at % inner_blocks));
                 }
               });
  const int64_t per_block = kLowRankColumns * (p.ranks / p.parts + 1) * together;
  parallel_for(row_blocks * column_blocks, kGrain / per_block + 1,
               [&](int64_t begin, int64_t end, int) {
                 for (int64_t at = begin; at < end; ++at) {
                   const int64_t row = at / column_blocks * kLowRankRows;
                   k.low_rank_block(p, find_block(p, row, at % column_blocks));
                 }
               });
  return Status::kOk;
}

}  // namespace exl3
