// One row times a trellis weight, both Hadamard sides in the same launch.
//
// Work split: the turns of all groups in a row, cut into runs of equal size for the warps of one
// thread block a multiprocessor. A thread block transforms the inputs that its turns need; a unit
// (128 outputs) that ends in it is finished there, with the sums that others leave in the L2.
// Memory: rings of weights, activations, sums (shape.h). Bound: the loop, 28 instructions for a
// tile of 256 weights at 4 bits; then latencies from x to y. Chosen: by measuring, for one row.
//
// The next launch may start at once: it shares the multiprocessors (shape.h), fetches weights and
// prepares factors, and reads or writes nothing else before this one is complete.
#pragma once
#include "cuda/even/finish.cuh"

namespace exl3::cuda {

static __device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
static __device__ __forceinline__ void wait_for_last() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define EXL3_EVEN_BOUNDS(norm) __maxnreg__((norm) ? kNormRegisters : kPlainRegisters)
#else
#define EXL3_EVEN_BOUNDS(norm) __launch_bounds__(kEvenThreads, 2)
#endif

template <int kBits, bool kNorm, class Product>
__global__ void EXL3_EVEN_BOUNDS(kNorm) even_kernel(const __grid_constant__ EvenParams p) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ EvenRow row;
  start_next();
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // A kernel that sets its registers has all that it may have.
  if constexpr (!kNorm) asm volatile("setmaxnreg.dec.sync.aligned.u32 152;");
#endif
  if (static_cast<int>(blockIdx.x) * p.run * kEvenWarps >= p.all) return wait_for_last();
  const EvenShare<kBits> share(p);
  constexpr int kDepth = even_depth(kBits), kRing = kDepth * even_turn_bytes(kBits);
  EvenStream<kBits, kDepth> stream(share, shared + share.warp * kRing);
  auto* activations = reinterpret_cast<uint32_t*>(shared + kEvenWarps * kRing);
  auto* sums = reinterpret_cast<float*>(activations + p.input_bytes / 4);
  float* inputs = sums + p.sums_bytes / 4;
  const EvenInput<kBits, kNorm, Product> input(share, activations, inputs, row);
  input.prepare();
  EvenFinish<kBits, EvenOneRow<kNorm>>::prepare(share);
  __syncthreads();
  wait_for_last();
  input.run();
  even_multiply<kBits, Product>(share, stream, activations, inputs, row.most, sums);
  __syncthreads();
  EvenFinish<kBits, EvenOneRow<kNorm>>(share, sums, {row}).run();
#endif
}

}  // namespace exl3::cuda
