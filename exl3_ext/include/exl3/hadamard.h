#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

// y = Hblk(x * pre_scale) * post_scale, H the 128 x 128 Sylvester matrix / sqrt(128).
struct HadamardParams {
  const void* x;                // [rows, dim] row-major, dtype
  void* y;                      // [rows, dim], may be x
  const half_bits* pre_scale;   // [dim] float16 or null
  const half_bits* post_scale;  // [dim] float16 or null
  int64_t rows, dim;            // dim a multiple of 128
  DType dtype;                  // of x and y; arithmetic is float32
};

Status hadamard_cpu(const HadamardParams& p);
Status hadamard_cuda(const HadamardParams& p, CudaStream stream);

}  // namespace exl3
