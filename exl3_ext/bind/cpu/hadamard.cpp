#include "exl3/hadamard.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>

#include "bind/cpu/launch.h"

namespace exl3::bind {
namespace {

Tensor hadamard_128(const Tensor& x, const std::optional<Tensor>& pre_scale,
                    const std::optional<Tensor>& post_scale) {
  const char* op = "hadamard_128";
  EXL3_CHECK_CPU(op, x);
  EXL3_CHECK_CONTIGUOUS(op, x);
  EXL3_CHECK(op, is_float(x), "x must be float32, float16 or bfloat16");
  EXL3_CHECK(op, x.dim() >= 1, "x has no dims");
  const int64_t dim = x.size(x.dim() - 1);
  EXL3_CHECK(op, dim % kHadamardDim == 0, "x.size(-1) is ", dim, ", expected a multiple of 128");
  Tensor y = torch::stable::empty_like(x);
  std::vector<Tensor> kept{x, y};
  for (const auto* s : {&pre_scale, &post_scale}) {
    if (!s->has_value()) continue;
    const Tensor& scale = **s;
    EXL3_CHECK_ARG(op, scale, Half);
    EXL3_CHECK_SIZE(op, scale, 0, dim);
    kept.push_back(scale);
  }
  HadamardParams p{};
  p.x = data<void>(x);
  p.y = data_mut<void>(y);
  p.pre_scale = pre_scale ? data<half_bits>(*pre_scale) : nullptr;
  p.post_scale = post_scale ? data<half_bits>(*post_scale) : nullptr;
  p.dim = dim;
  p.rows = dim ? x.numel() / dim : 0;
  p.dtype = dtype_of(x);
  launch(op, hadamard_cpu, p, {}, kept);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) { m.impl("hadamard_128", TORCH_BOX(&hadamard_128)); }

}  // namespace exl3::bind
