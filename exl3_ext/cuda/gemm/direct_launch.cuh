// Launch of the direct product's instances of one bit rate.
#pragma once
#include "cuda/common/launch.cuh"
#include "cuda/gemm/direct.cuh"

namespace exl3::cuda {

template <int kBits, bool kMul1, int kRows>
Status launch_direct(const DirectParams& p, const DirectInput& in, int64_t thread_blocks,
                     CudaStream stream) {
  const LaunchShape shape{dim3(static_cast<unsigned>(thread_blocks)), kDirectThreads,
                          p.config.parts * (p.activation >= 0 ? 2 : 1),
                          direct_shared_bytes(p.config, kBits)};
  return launch_early(direct_kernel<kBits, kMul1, kRows>, shape, stream, p, in);
}

template <int kBits, bool kMul1>
Status pick_direct_rows(const DirectParams& p, const DirectInput& in, int64_t thread_blocks,
                        CudaStream stream) {
  switch (p.config.rows) {
    case 16:
      return launch_direct<kBits, kMul1, 16>(p, in, thread_blocks, stream);
    case 32:
      return launch_direct<kBits, kMul1, 32>(p, in, thread_blocks, stream);
    case 64:
      return launch_direct<kBits, kMul1, 64>(p, in, thread_blocks, stream);
    case 128:
      return launch_direct<kBits, kMul1, 128>(p, in, thread_blocks, stream);
  }
  return Status::kNoKernel;
}

template <int kBits>
Status direct_of_bits(const DirectParams& p, const DirectInput& in, int64_t thread_blocks,
                      CudaStream stream) {
  if (p.w[0].codebook == Codebook::kMul1) {
    return pick_direct_rows<kBits, true>(p, in, thread_blocks, stream);
  }
  return pick_direct_rows<kBits, false>(p, in, thread_blocks, stream);
}

#define EXL3_DIRECT_INSTANCE(bits)                                                            \
  template Status direct_of_bits<bits>(const DirectParams& p, const DirectInput& in, int64_t, \
                                       CudaStream);

}  // namespace exl3::cuda
