// Instances of the direct product: 1 to 4 bits. Two files, so that two compilers share the work.
#include "cuda/gemm/direct_launch.cuh"

namespace exl3::cuda {

EXL3_DIRECT_INSTANCE(1)
EXL3_DIRECT_INSTANCE(2)
EXL3_DIRECT_INSTANCE(3)
EXL3_DIRECT_INSTANCE(4)

int direct_clusters(int rows, int cluster, int shared_bytes) {
  const void* kernel = rows > 64 ? reinterpret_cast<const void*>(direct_kernel<4, true, 128>)
                                 : reinterpret_cast<const void*>(direct_kernel<4, true, 64>);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(kDirectThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  cudaFuncAttributes found{};
  // Without sm_90a code the kernel is empty.
  constexpr int kFewestRegisters = 64;
  if (cudaFuncGetAttributes(&found, kernel) != cudaSuccess || found.numRegs < kFewestRegisters ||
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) !=
          cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) {
    cudaGetLastError();  // an answer, no error
    return 0;
  }
  return count;
}

}  // namespace exl3::cuda
