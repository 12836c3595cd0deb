// The even product on the current device.
#include "cuda/even/launch.cuh"

namespace exl3 {

static_assert(sizeof(cuda::EvenRow) + 1024 <= cuda::kEvenReservedBytes);

EvenDevice even_device() {
  EvenDevice device{};
  int index = 0;
  if (capability() < 80 || cudaGetDevice(&index) != cudaSuccess) return device;
  cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, index);
  device.shared_bytes = shared_memory().block - static_cast<int>(sizeof(cuda::EvenRow));
  device.shared_bytes_all = shared_memory().processor;
  device.pairs = capability() / 10 == 9;
  return device;
}

Status even_cuda(const EvenParams& p, CudaStream stream) {
  const bool integer = p.codebook == Codebook::kMul1;
  if (p.fragments == 0) {
    return integer ? cuda::even_integers(p, stream) : cuda::even_halves(p, stream);
  }
  return integer ? cuda::even_rows_integers(p, stream) : cuda::even_rows_halves(p, stream);
}

}  // namespace exl3
