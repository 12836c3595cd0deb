#include "cuda/even/launch.cuh"

namespace exl3::cuda {

Status even_halves(const EvenParams& p, CudaStream stream) {
  return for_bits(p.bits,
                  [&]<int kBits>() { return even_run<kBits, EvenHalves<kBits>>(p, stream); });
}

}  // namespace exl3::cuda
