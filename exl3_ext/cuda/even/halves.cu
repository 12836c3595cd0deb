#include "cuda/even/launch.cuh"

namespace exl3::cuda {

Status even_halves(const EvenParams& p, CudaStream stream) {
  return even_of_bits<EvenHalves>(p, stream);
}

}  // namespace exl3::cuda
