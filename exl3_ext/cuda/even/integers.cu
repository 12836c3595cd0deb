#include "cuda/even/launch.cuh"

namespace exl3::cuda {

Status even_integers(const EvenParams& p, CudaStream stream) {
  return even_of_bits<EvenIntegers>(p, stream);
}

}  // namespace exl3::cuda
