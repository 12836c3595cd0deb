#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

// y = x @ W' for many rows, straight from the lane planes (layout in trellis.h): blocks of W' are
// decoded into a buffer in the second-level cache and used for all rows; W' is never whole.
// Products are bfloat16 with float32 sums where the CPU has instructions for it, else float32.
struct GemmLargeParams {
  const float* x;          // [m, k], rows x_stride apart: inputs after scale and Hadamard
  const uint16_t* planes;  // [n/16, k/16, 16*bits]
  float* y;                // [m, n], rows y_stride apart, overwritten
  void* workspace;         // gemm_large_workspace(m, k) bytes, 64-byte aligned; no initial state
  int64_t m, k, n;         // k, n multiples of 128
  int64_t x_stride, y_stride;  // in floats
  int bits;
  Codebook codebook;
};

// Bytes of workspace for each row and input, the same for every instruction level.
constexpr int kGemmLargeRowBytes = 4;
int64_t gemm_large_workspace(int64_t m, int64_t k);
Status gemm_large_cpu(const GemmLargeParams& p);

}  // namespace exl3
