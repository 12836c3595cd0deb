// Trellis search on CUDA: the launcher. The kernels are in search.cuh, one file a bit rate.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/encode/launch.h"
#include "cuda/encode/plan.cuh"

namespace exl3 {
namespace {

using namespace cuda;

__global__ void begin_kernel(SearchHeader* header, unsigned long long bad,
                             unsigned long long next) {
  header->bad = bad;
  header->next = next;
}

// Finds the first element that is NaN or infinite.
__global__ void check_kernel(const float* x, int64_t n, SearchHeader* header) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride)
    if (!isfinite(x[i])) atomicMin(&header->bad, static_cast<unsigned long long>(i));
}

// The fewest tiles side by side that still take all of them at once.
SearchShape shape_of(int64_t n_tiles, int bits, int multiprocessors) {
  int tiles = 1;
  while (tiles < most_tiles(bits) && n_tiles > int64_t{tiles} * multiprocessors) tiles *= 2;
  return {tiles, static_cast<int>(std::min<int64_t>(n_tiles, multiprocessors))};
}

using Launch = Status (*)(const EncodeParams&, const SearchShape&, CudaStream);
using Bytes = int64_t (*)(int);
constexpr Launch kLaunch[] = {launch_search<1>, launch_search<2>, launch_search<3>,
                              launch_search<4>, launch_search<5>, launch_search<6>,
                              launch_search<7>, launch_search<8>};
constexpr Bytes kBytes[] = {search_block_bytes<1>, search_block_bytes<2>, search_block_bytes<3>,
                            search_block_bytes<4>, search_block_bytes<5>, search_block_bytes<6>,
                            search_block_bytes<7>, search_block_bytes<8>};

}  // namespace

int64_t encode_cuda_workspace_bytes(int64_t n_tiles, int bits, int multiprocessors) {
  const SearchShape shape = shape_of(n_tiles, bits, multiprocessors);
  return kHeaderBytes + shape.blocks * kBytes[bits - 1](shape.tiles);
}

Status encode_cuda(const EncodeParams& p, CudaStream stream) {
  if (p.bits < 1 || p.bits > 8 || p.threads < 1) return Status::kBadArgument;
  const int64_t n = p.n_tiles * kTileNumel;
  if (n == 0) return Status::kOk;
  const SearchShape shape = shape_of(p.n_tiles, p.bits, p.threads);
  auto* header = reinterpret_cast<SearchHeader*>(p.workspace);
  begin_kernel<<<1, 1, 0, stream>>>(header, n, int64_t{shape.tiles} * shape.blocks);
  check_kernel<<<p.threads, 256, 0, stream>>>(p.tiles, n, header);
  return kLaunch[p.bits - 1](p, shape, stream);
}

}  // namespace exl3
