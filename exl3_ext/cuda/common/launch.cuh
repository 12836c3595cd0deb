// Launches that may start while the launch before them ends (programmatic dependent launch).
#pragma once
#include <cuda_runtime.h>

#include <atomic>

#include "exl3/status.h"

namespace exl3::cuda {

// True where the current device can start a launch early: from compute capability 9.0 on.
inline bool starts_early() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // 0: not asked yet, 1: no, 2: yes
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  int answer = known[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    answer = major >= 9 ? 2 : 1;
    known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 2;
}

// The kernel must call `wait_for_launch_before` in every block before it writes anything, and
// before it reads what earlier launches wrote.
template <class Kernel, class Params>
Status launch_early(Kernel* kernel, dim3 grid, int threads, int shared_bytes, CudaStream stream,
                    const Params& p) {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  if (starts_early()) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, p) == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

// Lets the next launch begin, then waits until all of the one before is done and visible.
static __device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

}  // namespace exl3::cuda
