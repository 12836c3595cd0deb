// Instances of the direct product: 5 to 8 bits.
#include "cuda/gemm/direct_launch.cuh"

namespace exl3::cuda {

EXL3_DIRECT_INSTANCE(5)
EXL3_DIRECT_INSTANCE(6)
EXL3_DIRECT_INSTANCE(7)
EXL3_DIRECT_INSTANCE(8)

}  // namespace exl3::cuda
