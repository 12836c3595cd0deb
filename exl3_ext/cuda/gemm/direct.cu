// The direct product's launches: input side, then the instance of the bit rate.
#include "cuda/common/bits.h"
#include "cuda/common/launch.cuh"
#include "cuda/gemm/direct_shape.h"

namespace exl3 {

using namespace cuda;

namespace {

int64_t row_blocks(const LinearGroup& group, const DirectConfig& config) {
  return (group.m + config.rows - 1) / config.rows;
}
// Halves that the input side writes for one weight.
int64_t inner_halves(const LinearGroup& group, const DirectConfig& config) {
  return row_blocks(group, config) * config.rows * group.k;
}

}  // namespace

DirectDevice direct_device() {
  constexpr int kDevices = 32;
  static DirectDevice known[kDevices] = {};
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess || index >= kDevices) index = 0;
  DirectDevice& d = known[index];
  if (d.shared_bytes == 0) {
    DirectDevice found{};
    const SharedMemory has = shared_memory();
    found.shared_bytes = has.block;
    found.shared_bytes_all = has.processor;
    found.warpgroups = capability() / 10 == 9;
    for (int c = 1; found.warpgroups && c <= kDirectCluster; ++c) {
      for (int wide = 0; wide < 2; ++wide) {
        const int rows = wide ? 128 : 64;
        found.clusters[wide][c] =
            direct_clusters(rows, c, direct_room(rows, found.shared_bytes, found.shared_bytes_all));
      }
    }
    d = found;
  }
  return d;
}

int64_t direct_workspace_bytes(const LinearGroup& group, const DirectConfig& config) {
  return group.count * inner_halves(group, config) * 2 + group.m * 4;
}

Status direct_cuda(const DirectParams& p, CudaStream stream) {
  const DirectConfig& c = p.config;
  if (c.rows < 1 || p.k % kHadamardDim != 0) return Status::kNoKernel;
  InputSideParams side{};
  DirectInput in{};
  auto* inner = reinterpret_cast<half_bits*>(p.workspace);
  for (int i = 0; i < p.count; ++i) {
    side.suh[i] = p.w[i].suh;
    side.inner[i] = inner + i * inner_halves(p, c);
    in.rows[i] = side.inner[i];
  }
  side.row_scale = reinterpret_cast<float*>(inner + p.count * inner_halves(p, c));
  in.row_scale = side.row_scale;
  side.count = p.count;
  side.x = p.x;
  side.norm_weight = p.norm_weight;
  side.norm_eps = p.norm_eps;
  side.norm_offset = p.norm_offset;
  side.m = p.m;
  side.in_features = p.in_features;
  side.k = p.k;
  side.chunk_rows = c.rows;
  const Status status = input_side_cuda(side, stream);
  if (status != Status::kOk) return status;
  const bool pair = p.activation >= 0;
  int64_t units = 0;
  for (int i = 0; i < (pair ? 1 : p.count); ++i) {
    units += (p.w[i].n / kHadamardDim + c.blocks - 1) / c.blocks;
  }
  const int64_t blocks = units * row_blocks(p, c) * c.parts * (pair ? 2 : 1);
  return for_bits(p.w[0].bits,
                  [&]<int kBits>() { return direct_of_bits<kBits>(p, in, blocks, stream); });
}

}  // namespace exl3
