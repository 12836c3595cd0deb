// Launches of the even product for one kind of weights.
#pragma once
#include "cuda/common/launch.cuh"
#include "cuda/even/even.cuh"

namespace exl3::cuda {

Status even_integers(const EvenParams& p, CudaStream stream);  // mul1
Status even_halves(const EvenParams& p, CudaStream stream);    // 3inst, mcg

template <int kBits, bool kNorm, class Product>
Status even_run(const EvenParams& p, CudaStream stream) {
  auto* kernel = even_kernel<kBits, kNorm, Product>;
  // One carve-out for all, or thread blocks of two launches do not share a multiprocessor.
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared) != cudaSuccess) {
    return Status::kDeviceError;
  }
  return launch_early(
      kernel, {dim3(static_cast<unsigned>(p.blocks)), kEvenThreads, 1, p.shared_bytes}, stream, p);
}

template <int kBits, class Product>
Status even_of(const EvenParams& p, CudaStream stream) {
  return p.norm_weight ? even_run<kBits, true, Product>(p, stream)
                       : even_run<kBits, false, Product>(p, stream);
}

template <template <int> class Product>
Status even_of_bits(const EvenParams& p, CudaStream stream) {
  switch (p.bits) {
    case 1:
      return even_of<1, Product<1>>(p, stream);
    case 2:
      return even_of<2, Product<2>>(p, stream);
    case 3:
      return even_of<3, Product<3>>(p, stream);
    case 4:
      return even_of<4, Product<4>>(p, stream);
    case 5:
      return even_of<5, Product<5>>(p, stream);
    case 6:
      return even_of<6, Product<6>>(p, stream);
    case 7:
      return even_of<7, Product<7>>(p, stream);
    case 8:
      return even_of<8, Product<8>>(p, stream);
  }
  return Status::kNoKernel;
}

}  // namespace exl3::cuda
