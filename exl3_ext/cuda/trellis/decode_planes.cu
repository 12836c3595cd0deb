// W' (k, n) in float16 from lane words, for products of many rows.
// Work split: a thread block has 128 inputs by 64 outputs, a warp 16 inputs of them. Memory: 18
// KiB, to write whole 128-byte rows. Bound: bytes written. Chosen: when the small-batch product is
// not.
#include <cuda_runtime.h>

#include "cuda/common/bits.h"
#include "cuda/trellis/lane_words.cuh"
#include "cuda/trellis/values.cuh"
#include "exl3/trellis.h"

namespace exl3 {
namespace {

using namespace cuda;

constexpr int kWarps = 8;
constexpr int kOutputs = 64;
constexpr int kPitch = kOutputs + 8;  // in halves: rows 2q of a store fall in different banks

template <int kBits, Codebook kCodebook>
__global__ void __launch_bounds__(kWarps* kWarp) decode_planes_kernel(PlanesDecodeParams p) {
  __shared__ __align__(16) __half tiles[kWarps][kTileDim][kPitch];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x & (kWarp - 1);
  const int64_t step = static_cast<int64_t>(blockIdx.y) * kWarps + warp, group = blockIdx.x;
  LaneWords<kBits> words;
  words.load(p.words + (group * (p.k / kTileDim) + step) * (kWarp * kBits), lane);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t s[8];
    words.states(q, s);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int row = 2 * (lane & 3) + (e & 1) + 8 * ((e >> 1) & 1);
      const int column = q * kTileDim + (lane >> 2) + 8 * (e >> 2);
      tiles[warp][row][column] = value_of<kCodebook>(s[e] & 0xFFFFu);
    }
  }
  __syncwarp();
  half_bits* to = p.w + step * kTileDim * p.n + group * kOutputs;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 4 + lane / 8, column = lane % 8 * 8;
    *reinterpret_cast<uint4*>(to + row * p.n + column) =
        *reinterpret_cast<const uint4*>(&tiles[warp][row][column]);
  }
}

template <int kBits>
Status start(const PlanesDecodeParams& p, CudaStream stream) {
  const dim3 grid(static_cast<unsigned>(p.n / kOutputs),
                  static_cast<unsigned>(p.k / (kWarps * kTileDim)));
  constexpr int kThreads = kWarps * kWarp;
  switch (p.codebook) {
    case Codebook::k3inst:
      decode_planes_kernel<kBits, Codebook::k3inst><<<grid, kThreads, 0, stream>>>(p);
      break;
    case Codebook::kMcg:
      decode_planes_kernel<kBits, Codebook::kMcg><<<grid, kThreads, 0, stream>>>(p);
      break;
    case Codebook::kMul1:
      decode_planes_kernel<kBits, Codebook::kMul1><<<grid, kThreads, 0, stream>>>(p);
      break;
  }
  return cudaPeekAtLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

}  // namespace

Status planes_decode_cuda(const PlanesDecodeParams& p, CudaStream stream) {
  if (p.k % kHadamardDim != 0 || p.n % kOutputs != 0) return Status::kBadArgument;
  if (p.k == 0 || p.n == 0) return Status::kOk;
  return cuda::for_bits(p.bits, [&]<int kBits>() { return start<kBits>(p, stream); });
}

}  // namespace exl3
