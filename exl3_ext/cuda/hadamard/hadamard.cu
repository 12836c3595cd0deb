// y = Hblk(x * pre_scale) * post_scale.
// Work split: one warp a 128-block, 4 warps a thread block. Memory: no shared memory. Bound: bytes
// (each value read and written once). Chosen: always, when the transform is not fused elsewhere.
#include <cuda_runtime.h>

#include "cuda/common/math.cuh"
#include "exl3/hadamard.h"

namespace exl3 {
namespace {

using namespace cuda;

constexpr int kWarps = 4;

template <class T>
__global__ void __launch_bounds__(kWarps* kWarp) hadamard_kernel(HadamardParams p, int64_t blocks) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (block >= blocks) return;
  const int lane = threadIdx.x & (kWarp - 1);
  const int column = static_cast<int>(block % (p.dim / kHadamardDim)) * kHadamardDim + lane * 4;
  const int64_t at = block * kHadamardDim + lane * 4;
  const T* x = static_cast<const T*>(p.x) + at;
  T* y = static_cast<T*>(p.y) + at;
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = to_float<T>(x[i]);
    if (p.pre_scale) v[i] *= __half2float(__ushort_as_half(p.pre_scale[column + i]));
  }
  warp_hadamard_128(v);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float s = kHadamardNorm;
    if (p.post_scale) s *= __half2float(__ushort_as_half(p.post_scale[column + i]));
    y[i] = from_float<T>(v[i] * s);
  }
}

}  // namespace

Status hadamard_cuda(const HadamardParams& p, CudaStream stream) {
  if (p.dim % kHadamardDim != 0) return Status::kBadArgument;
  const int64_t blocks = p.rows * (p.dim / kHadamardDim);
  if (blocks == 0) return Status::kOk;
  const unsigned grid = static_cast<unsigned>((blocks + kWarps - 1) / kWarps);
  const int threads = kWarps * kWarp;
  switch (p.dtype) {
    case DType::kFloat32:
      hadamard_kernel<float><<<grid, threads, 0, stream>>>(p, blocks);
      break;
    case DType::kFloat16:
      hadamard_kernel<__half><<<grid, threads, 0, stream>>>(p, blocks);
      break;
    case DType::kBFloat16:
      hadamard_kernel<__nv_bfloat16><<<grid, threads, 0, stream>>>(p, blocks);
      break;
  }
  return cudaPeekAtLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

}  // namespace exl3
