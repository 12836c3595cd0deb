// Problem -> configuration of the small-batch product: pure arithmetic, no device calls.
#include <algorithm>

#include "cuda/gemv/shape.h"

namespace exl3 {
namespace {

struct Shape {
  bool integer, pair;
  int bits, k_blocks;
  int64_t units;  // blocks of 128 outputs, or pairs of them
};

// Thread blocks that a multiprocessor holds at once by registers (gemv_blocks in gemv.cu).
int register_blocks(bool integer, int fragments) {
  if (integer) return fragments == 1 ? 4 : fragments == 2 ? 3 : 2;
  return fragments == 1 ? 3 : 2;
}

// Issue slots that the busiest multiprocessor needs, in arbitrary units: steps of a warp, a fixed
// cost for both sides, and what few warps leave idle.
double cost_of(const Shape& s, const GemvDevice& device, int rows, int fragments, int cluster,
               int shared) {
  const int64_t blocks = s.units * cluster;
  const double per_sm =
      static_cast<double>((blocks + device.multiprocessors - 1) / device.multiprocessors);
  const int by_memory = std::max(1, device.shared_bytes_all / (shared + 1024));
  const double resident =
      std::min<double>({per_sm, double(by_memory), double(register_blocks(s.integer, fragments))});
  const double efficiency = resident < 2 ? 0.5 : resident < 3 ? 0.8 : 1.0;
  const double k_blocks = (s.k_blocks + cluster - 1) / cluster;
  const double steps = k_blocks * 8 / (s.pair ? 2 : 4);
  const double tile = (s.integer ? 20.0 : 44.0) + 4.0 * fragments;
  const double sides = 400.0 + 20.0 * k_blocks * rows * (s.pair ? 2 : 1);
  return per_sm * (steps * 4 * tile + sides) / efficiency;
}

}  // namespace

int gemv_fragments(Codebook codebook, int rows) {
  const int each = cuda::gemv_fragment_rows(codebook == Codebook::kMul1);
  const int needed = (rows + each - 1) / each;
  return needed <= 1 ? 1 : needed <= 2 ? 2 : 4;
}

GemvConfig gemv_select(const LinearGroup& group, const GemvDevice& device, int cluster) {
  Shape s{};
  s.integer = group.w[0].codebook == Codebook::kMul1;
  s.pair = group.activation >= 0;
  s.bits = group.w[0].bits;
  s.k_blocks = static_cast<int>(group.k / kHadamardDim);
  for (int i = 0; i < group.count; ++i) {
    if (group.w[i].bits != s.bits || group.w[i].codebook != group.w[0].codebook) return {};
    if (i == 0 || !s.pair) s.units += group.w[i].n / kHadamardDim;
  }
  if (group.k < kHadamardDim || s.units == 0) return {};
  for (int rows = static_cast<int>(std::min<int64_t>(group.m, kGemvMaxRows)); rows >= 1;
       rows = rows > 8   ? 8
              : rows > 4 ? 4
              : rows > 1 ? 1
                         : 0) {
    GemvConfig best{};
    double least = 0;
    const int fragments = gemv_fragments(group.w[0].codebook, rows);
    for (int c : {1, 2, 4, 8}) {
      if (c > s.k_blocks || (c > 1 && !device.clusters) || (cluster != 0 && c != cluster)) continue;
      const int shared =
          cuda::gemv_shared(s.integer, s.pair, s.bits, fragments, rows, s.k_blocks, c).total;
      if (shared > device.shared_bytes) continue;
      const double cost = cost_of(s, device, rows, fragments, c, shared);
      if (best.rows == 0 || cost < least) best = {rows, fragments, c, shared}, least = cost;
    }
    if (best.rows != 0) return best;
  }
  return {};
}

}  // namespace exl3
