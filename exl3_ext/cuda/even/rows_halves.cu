#include "cuda/even/launch.cuh"

namespace exl3::cuda {

Status even_rows_halves(const EvenParams& p, CudaStream stream) {
  return for_bits(p.bits, [&]<int kBits>() {
    switch (p.fragments) {
      case 1:
        return even_rows_run<kBits, HalfProduct<kBits, 1>>(p, stream);
      case 2:
        return even_rows_run<kBits, HalfProduct<kBits, 2>>(p, stream);
    }
    return Status::kNoKernel;
  });
}

}  // namespace exl3::cuda
