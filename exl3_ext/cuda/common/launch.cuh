// Launches that may start while the launch before ends, in clusters or not.
#pragma once
#include <cuda_runtime.h>

#include "cuda/common/device.h"
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3::cuda {

struct LaunchShape {
  dim3 grid;
  int threads;
  int cluster;       // thread blocks; 1 before compute capability 9.0
  int shared_bytes;  // dynamic
};

// From compute capability 9.0 on the launch may start early: the kernel waits by
// cudaGridDependencySynchronize before it reads what launches before wrote, or writes.
template <class Kernel, class... Args>
Status launch_early(Kernel* kernel, const LaunchShape& shape, CudaStream stream,
                    const Args&... args) {
  if (shape.shared_bytes > 40 * 1024 &&  // 48 KiB with the static part
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           shape.shared_bytes) != cudaSuccess) {
    return Status::kDeviceError;
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = capability() >= 90 ? 2 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...) == cudaSuccess ? Status::kOk
                                                                     : Status::kDeviceError;
}

}  // namespace exl3::cuda
