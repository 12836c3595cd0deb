// Problem -> configuration of the direct product: pure arithmetic, no device calls.
#include <algorithm>

#include "cuda/gemm/direct_shape.h"

namespace exl3 {
namespace {

int rows_for(int64_t m) { return m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : 128; }

// Turns of all waves of thread blocks: a turn takes the same time whatever else the multiprocessor
// runs (H200), and both sides of a wave as much as eight. Each further part is one more to add.
double cost_of(const LinearGroup& group, const DirectDevice& device, const DirectConfig& c) {
  const bool pair = group.activation >= 0;
  int64_t clusters = 0;
  for (int i = 0; i < (pair ? 1 : group.count); ++i) {
    clusters += (group.w[i].n / kHadamardDim + c.blocks - 1) / c.blocks;
  }
  clusters *= (group.m + c.rows - 1) / c.rows;
  const int at_once = device.clusters[c.rows > 64][pair ? 2 * c.parts : c.parts];
  const int64_t waves = (clusters + at_once - 1) / at_once;
  const int64_t stages = group.k / (cuda::kChunk * cuda::direct_shares(c.blocks));
  const int64_t turns = (stages + c.parts - 1) / c.parts;
  return static_cast<double>(waves) * (2.0 * static_cast<double>(turns) + 8.0 + 0.25 * c.parts);
}

}  // namespace

DirectConfig direct_select(const LinearGroup& group, const DirectDevice& device, int parts) {
  const bool pair = group.activation >= 0;
  const int bits = group.w[0].bits;
  if (!device.warpgroups || group.k < kHadamardDim) return {};
  for (int i = 0; i < group.count; ++i) {
    if (group.w[i].bits != bits || group.w[i].codebook != group.w[0].codebook) return {};
  }
  const int rows = rows_for(group.m);
  const int room = cuda::direct_room(rows, device.shared_bytes, device.shared_bytes_all);
  DirectConfig best{};
  double least = 0;
  for (int blocks : {1, 2}) {
    for (int p = 1; p <= kDirectCluster; ++p) {
      const int cluster = pair ? 2 * p : p;
      if (parts != 0 && p != parts) continue;
      if (cluster > kDirectCluster || device.clusters[rows > 64][cluster] == 0) continue;
      if (p > group.k / (cuda::kChunk * cuda::direct_shares(blocks))) continue;
      DirectConfig c{rows, blocks, p, 0};
      c.stages = std::min(cuda::kMostStages, (room - cuda::kSwizzleBytes) /
                                                 cuda::direct_stage_bytes(rows, blocks, bits));
      if (c.stages < cuda::kFewestStages || cuda::direct_shared_bytes(c, bits) > room) continue;
      const double cost = cost_of(group, device, c);
      if (best.rows == 0 || cost < least) best = c, least = cost;
    }
  }
  return best;
}

}  // namespace exl3
