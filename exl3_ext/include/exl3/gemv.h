// Small-batch product straight from lane words on a GPU (decode steps).
#pragma once
#include "exl3/linear_cuda.h"

namespace exl3 {

constexpr int kGemvWarps = 8;     // of a thread block
constexpr int kGemvMaxRows = 16;  // of one launch

struct GemvDevice {
  int multiprocessors;
  int shared_bytes;      // that one thread block may have
  int shared_bytes_all;  // of a multiprocessor
  bool clusters;         // compute capability 9.0 or later
};

// How a launch is cut: `cluster` thread blocks share 128 outputs (of gate and of up with an
// activation), each with a part of k.
struct GemvConfig {
  int rows;       // of one launch, at most; 0: no kernel
  int fragments;  // of the instance
  int cluster;
  int shared_bytes;
};

struct GemvParams : LinearCudaParams {
  GemvConfig config;
  unsigned char* workspace;  // gemv_workspace_bytes, 16-byte aligned; contents do not matter
};

int64_t gemv_workspace_bytes(const LinearGroup& group, const GemvConfig& config);
// The input side of up to kGemvMaxRows rows alone, into a workspace of gemv_input_bytes.
int64_t gemv_input_bytes(const LinearGroup& group, const GemvConfig& config);
Status gemv_input_cuda(const GemvParams& p, CudaStream stream);
// Fragments of an instance for that many rows: 1, 2 or 4.
int gemv_fragments(Codebook codebook, int rows);

// Pure function of the problem. `cluster` 0 chooses.
GemvConfig gemv_select(const LinearGroup& group, const GemvDevice& device, int cluster = 0);
GemvDevice gemv_device();  // the current one
// All weights of one bit rate and codebook; y must not overlap x. Any m: launches of config.rows.
Status gemv_cuda(const GemvParams& p, CudaStream stream);

}  // namespace exl3
