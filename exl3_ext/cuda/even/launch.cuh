// Launches of the even product for one kind of weights.
#pragma once
#include "cuda/common/bits.h"
#include "cuda/common/launch.cuh"
#include "cuda/even/rows.cuh"

namespace exl3::cuda {

Status even_integers(const EvenParams& p, CudaStream stream);  // mul1
Status even_halves(const EvenParams& p, CudaStream stream);    // 3inst, mcg
Status even_rows_integers(const EvenParams& p, CudaStream stream);
Status even_rows_halves(const EvenParams& p, CudaStream stream);

template <class Kernel>
Status even_start(Kernel* kernel, const EvenParams& p, CudaStream stream) {
  // One carve-out for all, or thread blocks of two launches do not share a multiprocessor.
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared) != cudaSuccess) {
    return Status::kDeviceError;
  }
  return launch_early(
      kernel, {dim3(static_cast<unsigned>(p.blocks)), kEvenThreads, 1, p.shared_bytes}, stream, p);
}

template <int kBits, class Product>
Status even_run(const EvenParams& p, CudaStream stream) {
  return p.norm_weight ? even_start(even_kernel<kBits, true, Product>, p, stream)
                       : even_start(even_kernel<kBits, false, Product>, p, stream);
}
template <int kBits, class Product>
Status even_rows_run(const EvenParams& p, CudaStream stream) {
  return even_start(even_rows_kernel<kBits, Product>, p, stream);
}

}  // namespace exl3::cuda
