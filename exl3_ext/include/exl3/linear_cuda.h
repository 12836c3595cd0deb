// exl3::linear on a GPU: the problem, and the two sides of the product by decoded blocks of W'.
// The small-batch product is in gemv.h.
#pragma once
#include "exl3/linear.h"
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

// A matrix whose rows lie `stride` elements apart.
struct Rows {
  void* data;
  int64_t stride;
  DType type;
};

struct LinearCudaParams : LinearGroup {
  Rows x;         // [m, in_features]
  Rows residual;  // [m, columns] or null data; may be y
  Rows y;         // [m, columns of y]
};

// inner = Hblk(x / rms(x) * norm * suh) in float16 and the factor that was left out of a row:
// rms(x), or rms(x) / sqrt(rms(x)^2 + eps) with a norm. Rows of size one cannot overflow in the
// product: |y'| <= sqrt(k) * |column of W'|. For `count` weights of one group at once: the row and
// its size are the same for all.
struct InputSideParams {
  Rows x;  // [m, in_features]
  const float* norm_weight;
  const half_bits* suh[kLinearGroup];  // [k] each
  half_bits* inner[kLinearGroup];      // [m, k] each, unless chunk_rows
  float* row_scale;                    // [m]
  int count;
  float norm_eps, norm_offset;
  int64_t m, in_features, k;
  // 0; or inner is [m/chunk_rows, rounded up][k/64][chunk_rows][64], where the units of 16 bytes of
  // row r's 64 are swizzled: unit u stands at u ^ (r mod 8).
  int chunk_rows;
};
Status input_side_cuda(const InputSideParams& p, CudaStream stream);

// y = row_scale * Hblk(inner) * svh + bias for columns 0..out of one weight; with `up`,
// y = act(this) * (the same of up). Then + residual.
struct OutputHalf {
  const half_bits* inner;  // [m, n]
  const half_bits* svh;    // [n]
  const float* bias;       // [out] or null
};
struct OutputSideParams {
  OutputHalf gate, up;      // up only with an activation
  const float* gate_scale;  // [m]
  const float* up_scale;    // [m]
  Rows residual;            // at the weight's first column, or null data
  Rows y;                   // likewise
  int64_t m, n, out;        // n: columns of inner, a multiple of 128
  int activation;
};
Status output_side_cuda(const OutputSideParams& p, CudaStream stream);

// y = act(gate) * up + residual of finished float32 halves.
struct GateParams {
  const float* gate;  // [m, 2 * out]: gate | up
  Rows residual, y;
  int64_t m, out;
  int activation;
};
Status gate_cuda(const GateParams& p, CudaStream stream);

}  // namespace exl3
