// Both sides of a product by decoded blocks of W' (struct comments in exl3/linear_cuda.h).
// Work split: input side a thread block a row, output side a warp a row and block of 128.
// Memory: 32 floats. Bound: bytes. Chosen: when the small-batch product is not.
#include <cuda_runtime.h>

#include "cuda/common/rows.cuh"

namespace exl3 {
namespace {

using namespace cuda;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;

// 1 / sqrt(mean square) of the row, the same in every thread; 1 for a row of zeros.
__device__ float inverse_rms(const InputSideParams& p, int64_t row, float* mean_square) {
  __shared__ float sums[kWarps];
  const int lane = threadIdx.x & (kWarp - 1);
  float sum = 0.0f;
  for (int64_t column = threadIdx.x * 4; column < p.in_features; column += kThreads * 4) {
    float v[4];
    load4(p.x.data, p.x.type, row * p.x.stride + column, count4(column, p.in_features), v);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = fmaf(v[i], v[i], sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += sums[w];
  *mean_square = sum / static_cast<float>(p.in_features);
  // Smaller rows (below 1e-18) count as they are: 1 / rms would overflow.
  return *mean_square < 1e-36f ? 1.0f : rsqrtf(*mean_square);
}

__global__ void __launch_bounds__(kThreads)
    input_side_kernel(const __grid_constant__ InputSideParams p) {
  const int64_t row = blockIdx.x;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x & (kWarp - 1);
  float mean_square;
  const float inverse = inverse_rms(p, row, &mean_square);
  if (threadIdx.x == 0) {
    const float rms = 1.0f / inverse;
    p.row_scale[row] = p.norm_weight ? rms * rsqrtf(mean_square + p.norm_eps) : rms;
  }
  for (int64_t column = (warp * kWarp + lane) * 4; column < p.k; column += kThreads * 4) {
    float v[4];
    load4(p.x.data, p.x.type, row * p.x.stride + column, count4(column, p.in_features), v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] *= inverse * half_value(p.suh[column + i]);
      if (p.norm_weight && column + i < p.in_features) {
        v[i] *= p.norm_weight[column + i] + p.norm_offset;
      }
    }
    warp_hadamard_128(v);
    __half2 h[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      h[i] = __floats2half2_rn(v[2 * i] * kHadamardNorm, v[2 * i + 1] * kHadamardNorm);
    }
    *reinterpret_cast<uint2*>(p.inner + row * p.k + column) = *reinterpret_cast<uint2*>(h);
  }
}

__device__ __forceinline__ void finish_half(const OutputSideParams& p, const OutputHalf& half,
                                            float row_scale, int64_t row, int64_t column,
                                            float (&v)[4]) {
  load4(half.inner, DType::kFloat16, row * p.n + column, 4, v);
  warp_hadamard_128(v);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] *= row_scale * kHadamardNorm * half_value(half.svh[column + i]);
    if (half.bias && column + i < p.out) v[i] += half.bias[column + i];
  }
}

__global__ void __launch_bounds__(kThreads)
    output_side_kernel(const __grid_constant__ OutputSideParams p) {
  const int64_t blocks = p.n / kHadamardDim;
  const int64_t job = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (job >= p.m * blocks) return;
  const int64_t row = job / blocks;
  const int64_t column = job % blocks * kHadamardDim + (threadIdx.x & (kWarp - 1)) * 4;
  float v[4];
  finish_half(p, p.gate, p.gate_scale[row], row, column, v);
  if (p.activation >= 0) {
    float up[4];
    finish_half(p, p.up, p.up_scale[row], row, column, up);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = activate(v[i], p.activation) * up[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i >= p.out) continue;
    if (p.residual.data) {
      v[i] += load_value(p.residual.data, p.residual.type, row * p.residual.stride + column + i);
    }
    store_value(p.y.data, p.y.type, row * p.y.stride + column + i, v[i]);
  }
}

__global__ void __launch_bounds__(kThreads) gate_kernel(const __grid_constant__ GateParams p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= p.m * p.out) return;
  const int64_t row = at / p.out, column = at % p.out;
  const float* gate = p.gate + row * 2 * p.out + column;
  float v = activate(gate[0], p.activation) * gate[p.out];
  if (p.residual.data) {
    v += load_value(p.residual.data, p.residual.type, row * p.residual.stride + column);
  }
  store_value(p.y.data, p.y.type, row * p.y.stride + column, v);
}

Status launched() {
  return cudaPeekAtLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

unsigned blocks_for(int64_t jobs, int per_block) {
  return static_cast<unsigned>((jobs + per_block - 1) / per_block);
}

}  // namespace

Status input_side_cuda(const InputSideParams& p, CudaStream stream) {
  if (p.k % kHadamardDim != 0) return Status::kBadArgument;
  if (p.m == 0) return Status::kOk;
  input_side_kernel<<<static_cast<unsigned>(p.m), kThreads, 0, stream>>>(p);
  return launched();
}

Status output_side_cuda(const OutputSideParams& p, CudaStream stream) {
  if (p.n % kHadamardDim != 0) return Status::kBadArgument;
  const int64_t jobs = p.m * (p.n / kHadamardDim);
  if (jobs == 0) return Status::kOk;
  output_side_kernel<<<blocks_for(jobs, kWarps), kThreads, 0, stream>>>(p);
  return launched();
}

Status gate_cuda(const GateParams& p, CudaStream stream) {
  if (p.m * p.out == 0) return Status::kOk;
  gate_kernel<<<blocks_for(p.m * p.out, kThreads), kThreads, 0, stream>>>(p);
  return launched();
}

}  // namespace exl3
