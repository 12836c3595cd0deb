// Argument checks of hadamard_128, the same on every device.
#pragma once
#include <optional>

#include "bind/check.h"
#include "exl3/hadamard.h"

namespace exl3::bind {

inline HadamardParams hadamard_params(const Tensor& x, const Tensor& y,
                                      const std::optional<Tensor>& pre_scale,
                                      const std::optional<Tensor>& post_scale) {
  const char* op = "hadamard_128";
  EXL3_CHECK_CONTIGUOUS(op, x);
  EXL3_CHECK(op, is_float(x), "x must be float32, float16 or bfloat16");
  EXL3_CHECK(op, x.dim() >= 1, "x has no dims");
  const int64_t dim = x.size(x.dim() - 1);
  EXL3_CHECK(op, dim % kHadamardDim == 0, "x.size(-1) is ", dim, ", expected a multiple of 128");
  for (const auto* s : {&pre_scale, &post_scale}) {
    if (!s->has_value()) continue;
    const Tensor& scale = **s;
    EXL3_CHECK_SAME_DEVICE(op, scale, x);
    EXL3_CHECK_DTYPE(op, scale, Half);
    EXL3_CHECK_CONTIGUOUS(op, scale);
    EXL3_CHECK_SIZE(op, scale, 0, dim);
  }
  HadamardParams p{};
  p.x = data<void>(x);
  p.y = data_mut<void>(y);
  p.pre_scale = pre_scale ? data<half_bits>(*pre_scale) : nullptr;
  p.post_scale = post_scale ? data<half_bits>(*post_scale) : nullptr;
  p.dim = dim;
  p.rows = dim ? x.numel() / dim : 0;
  p.dtype = dtype_of(x);
  return p;
}

}  // namespace exl3::bind
