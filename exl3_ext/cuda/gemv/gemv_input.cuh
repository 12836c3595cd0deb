// The input side as a launch of its own, for two rows and more.
// Work split: a thread block a row and weight, a warp every 16th block of 128. Memory: 200 bytes.
// Bound: latency. Chosen: with the small-batch product of more than one row, in front of it.
#pragma once
#include "cuda/gemv/input.cuh"

namespace exl3::cuda {

constexpr int kInputWarps = 16;
constexpr int kInputKept = 4;  // blocks that a warp keeps in registers: k up to 8192

template <class Input>
__global__ void __launch_bounds__(kInputWarps* kWarp)
    gemv_input_kernel(const __grid_constant__ GemvParams p, int64_t activation_bytes) {
  __shared__ float squares[kInputWarps];
  __shared__ uint32_t most_of[kInputWarps];
  __shared__ int sums[kInputWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x & (kWarp - 1);
  const int row = blockIdx.x, weight = blockIdx.y, blocks = static_cast<int>(p.k) / kHadamardDim;
  const GemvWorkspace out(p.workspace, activation_bytes, p.count);
  const half_bits* suh = p.w[weight].suh;
  float v[kInputKept][4];  // factors first
#pragma unroll
  for (int i = 0; i < kInputKept; ++i) {
    const int block = warp + i * kInputWarps;
    if (block < blocks) input_factors(p, suh, block, v[i]);
  }
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
  uint4 raw[kInputKept];
#pragma unroll
  for (int i = 0; i < kInputKept; ++i) {
    const int block = warp + i * kInputWarps;
    if (block < blocks) raw[i] = input_raw(p, row, block);
  }
  float square = 0.0f, here, factor[4];
  uint32_t most = 0, largest;
#pragma unroll
  for (int i = 0; i < kInputKept; ++i) {
    if (warp + i * kInputWarps >= blocks) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) factor[e] = v[i][e];
    input_transform(p, raw[i], factor, v[i], &here, &largest);
    square += here;
    most = max(most, largest);
  }
  for (int block = warp + kInputKept * kInputWarps; block < blocks; block += kInputWarps) {
    float more[4];
    input_factors(p, suh, block, factor);
    input_transform(p, input_raw(p, row, block), factor, more, &here, &largest);
    square += here;
    most = max(most, largest);
  }
  square = warp_sum(square);
  if (lane == 0) squares[warp] = square, most_of[warp] = most;
  __syncthreads();
  square = 0.0f;
  for (int w = 0; w < kInputWarps; ++w) most = max(most, most_of[w]), square += squares[w];
  const float magnitude = __uint_as_float(most), inverse = inverse_of(magnitude, Input::kMost);
  const int64_t block_words = kStepsOfBlock * Input::kStepWords;
  uint32_t* to = out.activations + weight * blocks * block_words;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kInputKept; ++i) {
    const int block = warp + i * kInputWarps;
    if (block < blocks) sum += Input::store(to + block * block_words, row, v[i], inverse);
  }
  for (int block = warp + kInputKept * kInputWarps; block < blocks; block += kInputWarps) {
    float more[4];
    input_factors(p, suh, block, factor);
    input_transform(p, input_raw(p, row, block), factor, more, &here, &largest);
    sum += Input::store(to + block * block_words, row, more, inverse);
  }
  sum = warp_sum(sum);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0;
  for (int w = 0; w < kInputWarps; ++w) sum += sums[w];
  out.scale[weight * kGemvMaxRows + row] = scale_of(magnitude, Input::kMost);
  out.sum[weight * kGemvMaxRows + row] = sum;
  if (weight == 0) {
    out.inverse_rms[row] =
        p.norm_weight ? rsqrtf(square / static_cast<float>(p.in_features) + p.norm_eps) : 1.0f;
  }
}

}  // namespace exl3::cuda
