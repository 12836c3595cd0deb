#include "cuda/even/launch.cuh"

namespace exl3::cuda {

Status even_integers(const EvenParams& p, CudaStream stream) {
  return for_bits(p.bits,
                  [&]<int kBits>() { return even_run<kBits, EvenIntegers<kBits>>(p, stream); });
}

}  // namespace exl3::cuda
