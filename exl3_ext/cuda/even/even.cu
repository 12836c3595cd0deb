// Launches of the even product: instances by bit rate, with and without a norm.
#include "cuda/common/launch.cuh"
#include "cuda/even/even.cuh"

namespace exl3 {
namespace {

using namespace cuda;

template <int kBits, bool kNorm>
Status run(const EvenParams& p, CudaStream stream) {
  auto* kernel = even_kernel<kBits, kNorm>;
  // One carve-out for all, or thread blocks of two launches do not share a multiprocessor.
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared) != cudaSuccess) {
    return Status::kDeviceError;
  }
  return launch_early(
      kernel, {dim3(static_cast<unsigned>(p.blocks)), kEvenThreads, 1, p.shared_bytes}, stream, p);
}

template <int kBits>
Status run_bits(const EvenParams& p, CudaStream stream) {
  return p.norm_weight ? run<kBits, true>(p, stream) : run<kBits, false>(p, stream);
}

}  // namespace

EvenDevice even_device() {
  EvenDevice device{};
  int index = 0;
  if (capability() < 80 || cudaGetDevice(&index) != cudaSuccess) return device;
  cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, index);
  device.shared_bytes = shared_memory().block - static_cast<int>(sizeof(EvenRow));
  device.shared_bytes_all = shared_memory().processor;
  device.pairs = capability() / 10 == 9;
  return device;
}

Status even_cuda(const EvenParams& p, CudaStream stream) {
  switch (p.bits) {
    case 1:
      return run_bits<1>(p, stream);
    case 2:
      return run_bits<2>(p, stream);
    case 3:
      return run_bits<3>(p, stream);
    case 4:
      return run_bits<4>(p, stream);
    case 5:
      return run_bits<5>(p, stream);
    case 6:
      return run_bits<6>(p, stream);
    case 7:
      return run_bits<7>(p, stream);
    case 8:
      return run_bits<8>(p, stream);
  }
  return Status::kNoKernel;
}

}  // namespace exl3
