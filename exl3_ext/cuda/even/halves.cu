#include "cuda/even/launch.cuh"

namespace exl3::cuda {
namespace {

template <int kBits>
struct Row {
  static Status run(const EvenParams& p, CudaStream stream) {
    return even_run<kBits, EvenHalves<kBits>>(p, stream);
  }
};

}  // namespace

Status even_halves(const EvenParams& p, CudaStream stream) { return for_bits<Row>(p, stream); }

}  // namespace exl3::cuda
