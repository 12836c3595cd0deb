// What the CUDA library goes by on a device.
#include "cuda/common/device.h"

#include <torch/csrc/stable/library.h>

#include "bind/cuda/guard.h"

namespace exl3::bind {
namespace {

void configure_cuda(int64_t capability_cap) {
  EXL3_CHECK("configure_cuda", capability_cap >= 75 && capability_cap <= 9999, "capability_cap is ",
             capability_cap, ", expected 75 (for 7.5) or more");
  set_capability_cap(static_cast<int>(capability_cap));
}

// 90 for 9.0; 0: no code for this device.
int64_t cuda_capability(int64_t device) {
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  return capability();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("configure_cuda", TORCH_BOX(&configure_cuda));
  m.impl("cuda_capability", TORCH_BOX(&cuda_capability));
}

}  // namespace exl3::bind
