#include "cuda/even/launch.cuh"

namespace exl3::cuda {
namespace {

template <int kBits>
struct RowsHalfProduct {
  static Status run(const EvenParams& p, CudaStream stream) {
    switch (p.fragments) {
      case 1:
        return even_rows_run<kBits, HalfProduct<kBits, 1>>(p, stream);
      case 2:
        return even_rows_run<kBits, HalfProduct<kBits, 2>>(p, stream);
    }
    return Status::kNoKernel;
  }
};

}  // namespace

Status even_rows_halves(const EvenParams& p, CudaStream stream) {
  return for_bits<RowsHalfProduct>(p, stream);
}

}  // namespace exl3::cuda
