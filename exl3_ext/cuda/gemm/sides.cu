// Both sides of a product by decoded blocks of W' (struct comments in exl3/linear_cuda.h).
// Work split: input side a thread block a row (of few rows: a row and weight); output side half a
// warp a row and block of 128, eight values a lane, or a warp where rows are not aligned to 16
// bytes or not float16. Memory: 32 floats. Bound: bytes. Chosen: when the small-batch product is
// not; the input side also in front of the direct product.
#include <cuda_runtime.h>

#include "cuda/common/launch.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/vector.cuh"

namespace exl3 {
namespace {

using namespace cuda;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int64_t kFewRows = 256;  // whose weights have thread blocks of their own

// Where values from `column` on of a row's inner go; up to 8, inside a unit of 16 bytes.
__device__ __forceinline__ half_bits* inner_at(const InputSideParams& p, int j, int64_t row,
                                               int64_t column) {
  if (p.chunk_rows == 0) return p.inner[j] + row * p.k + column;
  const int64_t chunk = row / p.chunk_rows * (p.k / 64) + column / 64;
  const int64_t unit = (column / 8 ^ row) & 7;
  return p.inner[j] + (chunk * p.chunk_rows + row % p.chunk_rows) * 64 + unit * 8 + column % 8;
}

__device__ __forceinline__ void start_next_and_wait() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

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

// 128 values over 16 lanes, lane l holding 8l..8l+7: unnormalised Hadamard transform in place. Half
// a warp may do it alone.
__device__ __forceinline__ void hadamard_128_of_8(float (&v)[kVector]) {
#pragma unroll
  for (int h = 1; h < kVector; h *= 2) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i & h) continue;
      const float a = v[i], b = v[i + h];
      v[i] = a + b;
      v[i + h] = a - b;
    }
  }
  const int lane = threadIdx.x & (kWarp - 1);
  const unsigned half = 0xFFFFu << (lane & 16);
#pragma unroll
  for (int h = 1; h < 16; h *= 2) {
    const float sign = (lane & h) ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      v[i] = fmaf(sign, v[i], __shfl_xor_sync(half, v[i], h));
    }
  }
}

__device__ __forceinline__ void unpack8(const uint4& u, float (&v)[kVector]) {
  const __half2* h = reinterpret_cast<const __half2*>(&u);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = __half22float2(h[i]);
    v[2 * i] = f.x;
    v[2 * i + 1] = f.y;
  }
}

__device__ __forceinline__ void load8_bits(const half_bits* from, float (&v)[kVector]) {
  unpack8(*reinterpret_cast<const uint4*>(from), v);
}

// The row stays in registers, kTurns vectors a thread, while its size is found. Thread blocks share
// the weights of a row if blockIdx.y says so; the first one's scales are fetched while the launch
// before ends.
template <int kTurns>
__global__ void __launch_bounds__(kThreads)
    input_side_wide_kernel(const __grid_constant__ InputSideParams p) {
  __shared__ float sums[kWarps];
  const int64_t row = blockIdx.x;
  const half_bits* x = static_cast<const half_bits*>(p.x.data) + row * p.x.stride;
  uint4 raw[kTurns], suh[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const int64_t column = (int64_t{t} * kThreads + threadIdx.x) * kVector;
    if (column < p.k) suh[t] = *reinterpret_cast<const uint4*>(p.suh[blockIdx.y] + column);
  }
  start_next_and_wait();
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const int64_t column = (int64_t{t} * kThreads + threadIdx.x) * kVector;
    raw[t] = column < p.in_features ? *reinterpret_cast<const uint4*>(x + column) : uint4{};
  }
  float sum = 0.0f;
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    float v[kVector];
    unpack8(raw[t], v);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = fmaf(v[i], v[i], sum);
  }
  const float mean_square = sum_of_block(sum, sums) / static_cast<float>(p.in_features);
  const float inverse = mean_square < 1e-36f ? 1.0f : rsqrtf(mean_square);
  if (threadIdx.x == 0 && blockIdx.y == 0) {
    const float rms = 1.0f / inverse;
    p.row_scale[row] = p.norm_weight ? rms * rsqrtf(mean_square + p.norm_eps) : rms;
  }
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const int64_t column = (int64_t{t} * kThreads + threadIdx.x) * kVector;
    if (column >= p.k) continue;  // half warps leave together
    float v[kVector];
    unpack8(raw[t], v);
    if (p.norm_weight && column < p.in_features) {
      float w[kVector];
      load8(p.norm_weight + column, w);
#pragma unroll
      for (int i = 0; i < kVector; ++i) v[i] *= w[i] + p.norm_offset;
    }
#pragma unroll 1
    for (int j = blockIdx.y; j < p.count; j += gridDim.y) {
      float y[kVector];
      if (j == blockIdx.y) {
        unpack8(suh[t], y);
      } else {
        load8_bits(p.suh[j] + column, y);
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) y[i] *= v[i] * inverse;
      hadamard_128_of_8(y);
#pragma unroll
      for (int i = 0; i < kVector; ++i) y[i] *= kHadamardNorm;
      store8(reinterpret_cast<__half*>(inner_at(p, j, row, column)), y);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    input_side_kernel(const __grid_constant__ InputSideParams p) {
  start_next_and_wait();
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
      v[i] *= inverse;
      if (p.norm_weight && column + i < p.in_features) {
        v[i] *= p.norm_weight[column + i] + p.norm_offset;
      }
    }
    for (int j = 0; j < p.count; ++j) {
      float y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = v[i] * half_value(p.suh[j][column + i]);
      warp_hadamard_128(y);
      __half2 h[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        h[i] = __floats2half2_rn(y[2 * i] * kHadamardNorm, y[2 * i + 1] * kHadamardNorm);
      }
      *reinterpret_cast<uint2*>(inner_at(p, j, row, column)) = *reinterpret_cast<uint2*>(h);
    }
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

__device__ __forceinline__ void finish_wide(const OutputSideParams& p, const OutputHalf& half,
                                            float row_scale, int64_t row, int64_t column,
                                            float (&v)[kVector]) {
  load8_bits(half.inner + row * p.n + column, v);
  hadamard_128_of_8(v);
  float w[kVector];
  load8_bits(half.svh + column, w);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    v[i] *= row_scale * kHadamardNorm * w[i];
    if (half.bias && column + i < p.out) v[i] += half.bias[column + i];
  }
}

__global__ void __launch_bounds__(kThreads)
    output_side_wide_kernel(const __grid_constant__ OutputSideParams p) {
  const int64_t blocks = p.n / kHadamardDim;
  const int64_t own = static_cast<int64_t>(blockIdx.x) * (kThreads / 16) + threadIdx.x / 16;
  const bool there = own < p.m * blocks;
  const int64_t job = there ? own : 0;  // the others go along, for the shuffles
  const int64_t row = job / blocks;
  const int64_t column = job % blocks * kHadamardDim + (threadIdx.x & 15) * kVector;
  float v[kVector];
  finish_wide(p, p.gate, p.gate_scale[row], row, column, v);
  if (p.activation >= 0) {
    float up[kVector];
    finish_wide(p, p.up, p.up_scale[row], row, column, up);
#pragma unroll
    for (int i = 0; i < kVector; ++i) v[i] = activate(v[i], p.activation) * up[i];
  }
  if (!there || column >= p.out) return;
  if (p.residual.data) {
    float add[kVector];
    load8_bits(static_cast<const half_bits*>(p.residual.data) + row * p.residual.stride + column,
               add);
#pragma unroll
    for (int i = 0; i < kVector; ++i) v[i] += add[i];
  }
  store8(static_cast<__half*>(p.y.data) + row * p.y.stride + column, v);
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

// float16 rows that start at multiples of 16 bytes.
bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

bool is_wide(const Rows& rows) {
  return rows.type == DType::kFloat16 && is_aligned(rows.data) && rows.stride % kVector == 0;
}

unsigned blocks_for(int64_t jobs, int per_block) {
  return static_cast<unsigned>((jobs + per_block - 1) / per_block);
}

}  // namespace

Status input_side_cuda(const InputSideParams& p, CudaStream stream) {
  if (p.k % kHadamardDim != 0) return Status::kBadArgument;
  if (p.m == 0) return Status::kOk;
  const auto rows = static_cast<unsigned>(p.m);
  const unsigned weights = p.m <= kFewRows ? static_cast<unsigned>(p.count) : 1;
  constexpr int64_t kTurn = kThreads * kVector;
  bool wide = is_wide(p.x) && p.in_features % kVector == 0 && p.k <= 8 * kTurn;
  wide = wide && is_aligned(p.norm_weight);
  for (int j = 0; j < p.count; ++j) wide = wide && is_aligned(p.suh[j]);
  const auto start = [&](auto* kernel) {
    return launch_early(kernel, {dim3(rows, weights), kThreads, 1, 0}, stream, p);
  };
  if (!wide) {
    return launch_early(input_side_kernel, {dim3(rows), kThreads, 1, 0}, stream, p);
  }
  if (p.k <= kTurn) return start(input_side_wide_kernel<1>);
  if (p.k <= 2 * kTurn) return start(input_side_wide_kernel<2>);
  if (p.k <= 4 * kTurn) return start(input_side_wide_kernel<4>);
  return start(input_side_wide_kernel<8>);
}

Status output_side_cuda(const OutputSideParams& p, CudaStream stream) {
  if (p.n % kHadamardDim != 0) return Status::kBadArgument;
  const int64_t jobs = p.m * (p.n / kHadamardDim);
  if (jobs == 0) return Status::kOk;
  const bool aligned = is_aligned(p.gate.svh) && is_aligned(p.up.svh) && p.out % kVector == 0;
  if (aligned && is_wide(p.y) && (!p.residual.data || is_wide(p.residual))) {
    output_side_wide_kernel<<<blocks_for(jobs, kThreads / 16), kThreads, 0, stream>>>(p);
    return launched();
  }
  output_side_kernel<<<blocks_for(jobs, kWarps), kThreads, 0, stream>>>(p);
  return launched();
}

Status gate_cuda(const GateParams& p, CudaStream stream) {
  if (p.m * p.out == 0) return Status::kOk;
  gate_kernel<<<blocks_for(p.m * p.out, kThreads), kThreads, 0, stream>>>(p);
  return launched();
}

}  // namespace exl3
