// Product of some dozens of rows straight from lane words, on the tensor cores of Hopper GPUs.
#pragma once
#include "exl3/linear_cuda.h"

namespace exl3 {

constexpr int kDirectCluster = 8;  // thread blocks of a cluster, at most

struct DirectDevice {
  int shared_bytes;      // that one thread block may have
  int shared_bytes_all;  // of a multiprocessor
  // Clusters of 1..8 thread blocks that run at once: [0] up to 64 rows, [1] more.
  int clusters[2][kDirectCluster + 1];
  bool warpgroups;  // compute capability 9.x
};

// How a launch is cut: a thread block has `rows` rows of x and `blocks` blocks of 128 outputs of
// one weight; `parts` thread blocks of a cluster share k (with an activation, 2 * parts: gate and
// up).
struct DirectConfig {
  int rows;  // 16, 32, 64 or 128; 0: no kernel
  int blocks;
  int parts;
  int stages;  // of the ring, at least 3
};

struct DirectParams : LinearCudaParams {
  DirectConfig config;
  unsigned char* workspace;  // direct_workspace_bytes, 16-byte aligned; contents do not matter
};

// Pure function of the problem. `parts` 0 chooses.
DirectConfig direct_select(const LinearGroup& group, const DirectDevice& device, int parts = 0);
DirectDevice direct_device();  // the current one
int64_t direct_workspace_bytes(const LinearGroup& group, const DirectConfig& config);
// All weights of one bit rate and codebook; y must not overlap x.
Status direct_cuda(const DirectParams& p, CudaStream stream);

}  // namespace exl3
