#include "cuda/even/launch.cuh"

namespace exl3::cuda {
namespace {

template <int kBits>
struct RowsIntegerProduct {
  static Status run(const EvenParams& p, CudaStream stream) {
    switch (p.fragments) {
      case 1:
        return even_rows_run<kBits, IntegerProduct<kBits, 1>>(p, stream);
      case 2:
        return even_rows_run<kBits, IntegerProduct<kBits, 2>>(p, stream);
      case 4:
        return even_rows_run<kBits, IntegerProduct<kBits, 4>>(p, stream);
    }
    return Status::kNoKernel;
  }
};

}  // namespace

Status even_rows_integers(const EvenParams& p, CudaStream stream) {
  return for_bits<RowsIntegerProduct>(p, stream);
}

}  // namespace exl3::cuda
