#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "bind/cpu/launch.h"
#include "bind/hadamard_params.h"

namespace exl3::bind {
namespace {

Tensor hadamard_128(const Tensor& x, const std::optional<Tensor>& pre_scale,
                    const std::optional<Tensor>& post_scale) {
  Tensor y = torch::stable::empty_like(x);
  const HadamardParams p = hadamard_params(x, y, pre_scale, post_scale);
  std::vector<Tensor> scales;
  if (pre_scale) scales.push_back(*pre_scale);
  if (post_scale) scales.push_back(*post_scale);
  launch("hadamard_128", hadamard_cpu, p, {x, y}, scales);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) { m.impl("hadamard_128", TORCH_BOX(&hadamard_128)); }

}  // namespace exl3::bind
