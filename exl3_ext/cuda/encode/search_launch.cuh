// Launching the search of one bit rate; included by one file a rate.
#pragma once
#include "cuda/encode/search.cuh"

namespace exl3::cuda {

template <int K, int T, bool kInGlobal>
constexpr auto kernel_of() {
  if constexpr (K <= kEncodeCoarseBits)
    return coarse_kernel<K, T, kInGlobal>;
  else
    return search_kernel<K, T, kInGlobal>;
}

template <int K, int T, bool kInGlobal = false>
Status launch_tiles(const EncodeParams& p, int blocks, CudaStream stream) {
  auto* header = reinterpret_cast<SearchHeader*>(p.workspace);
  constexpr int kBytes = kInGlobal ? 0 : sizeof(SharedOf<K, T>);
  const auto kernel = kernel_of<K, T, kInGlobal>();
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes) !=
      cudaSuccess) {
    cudaGetLastError();
    return Status::kNoKernel;
  }
  kernel<<<blocks, kSearchThreads, kBytes, stream>>>(p, header, p.workspace + kHeaderBytes);
  return cudaPeekAtLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

template <int K>
Status launch_search(const EncodeParams& p, const SearchShape& shape, CudaStream stream) {
  if constexpr (kMayBeGlobal<K>)
    if (shape.in_global) return launch_tiles<K, 1, true>(p, shape.blocks, stream);
  if constexpr (most_tiles(K) >= 4)
    if (shape.tiles == 4) return launch_tiles<K, 4>(p, shape.blocks, stream);
  if constexpr (most_tiles(K) >= 2)
    if (shape.tiles == 2) return launch_tiles<K, 2>(p, shape.blocks, stream);
  return launch_tiles<K, 1>(p, shape.blocks, stream);
}

template <int K>
int search_shared_bytes(int tiles) {
  return tiles == 1   ? sizeof(SharedOf<K, 1>)
         : tiles == 2 ? sizeof(SharedOf < K, most_tiles(K) < 2 ? 1 : 2 >)
                      : sizeof(SharedOf<K, most_tiles(K)>);
}

template <int K>
int64_t search_block_bytes(const SearchShape& shape) {
  return shape.tiles * PlanOf<K, 1>::kBlockBytes + (shape.in_global ? kInGlobalBytes<K, 1> : 0);
}

}  // namespace exl3::cuda
