#include "cuda/even/launch.cuh"

namespace exl3::cuda {

Status even_rows_integers(const EvenParams& p, CudaStream stream) {
  return for_bits(p.bits, [&]<int kBits>() {
    switch (p.fragments) {
      case 1:
        return even_rows_run<kBits, IntegerProduct<kBits, 1>>(p, stream);
      case 2:
        return even_rows_run<kBits, IntegerProduct<kBits, 2>>(p, stream);
      case 4:
        return even_rows_run<kBits, IntegerProduct<kBits, 4>>(p, stream);
    }
    return Status::kNoKernel;
  });
}

}  // namespace exl3::cuda
