#include "exl3/gemm_large.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "bind/cpu/launch.h"

namespace exl3::bind {
namespace {

Tensor gemm_large(const Tensor& x, const Tensor& planes, int64_t codebook) {
  const char* op = "gemm_large";
  EXL3_CHECK_CPU(op, x);
  EXL3_CHECK_DTYPE(op, x, Float);
  EXL3_CHECK_DIM(op, x, 2);
  EXL3_CHECK(op, x.size(1) <= 1 || x.stride(1) == 1, "x.stride(1) is ", x.stride(1),
             ", expected 1");
  EXL3_CHECK_ARG(op, planes, Short);
  EXL3_CHECK_DIM(op, planes, 3);
  EXL3_CHECK_SIZE(op, x, 1, planes.size(1) * kTileDim);
  EXL3_CHECK(op, codebook >= 0 && codebook < kCodebooks, "codebook is ", codebook,
             ", expected 0, 1 or 2");
  const int64_t words = planes.size(2);
  EXL3_CHECK(op, words % 16 == 0 && words >= 16 && words <= 128, "planes.size(2) is ", words,
             ", expected 16 * bits, bits 1..8");
  GemmLargeParams p{};
  p.m = x.size(0);
  p.k = x.size(1);
  p.n = planes.size(0) * kTileDim;
  EXL3_CHECK(op, p.k % kHadamardDim == 0, "k is ", p.k, ", expected a multiple of 128");
  EXL3_CHECK(op, p.n % kHadamardDim == 0, "n is ", p.n, ", expected a multiple of 128");
  Tensor y = torch::stable::new_empty(x, {p.m, p.n});
  Tensor workspace =
      torch::stable::new_empty(x, {gemm_large_workspace(p.m, p.k)}, ScalarType::Byte);
  p.x = data<float>(x);
  p.x_stride = p.m > 1 ? x.stride(0) : p.k;
  p.planes = data<uint16_t>(planes);
  p.y = data_mut<float>(y);
  p.y_stride = p.n;
  p.workspace = data_mut<void>(workspace);
  p.bits = static_cast<int>(words / 16);
  p.codebook = static_cast<Codebook>(codebook);
  launch(op, gemm_large_cpu, p, {x, planes, y, workspace});
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) { m.impl("gemm_large", TORCH_BOX(&gemm_large)); }

}  // namespace exl3::bind
