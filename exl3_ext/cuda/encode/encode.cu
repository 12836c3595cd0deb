// Trellis search on CUDA: the launcher. The kernels are in search.cuh, one file a bit rate.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/common/device.h"
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

struct Search {
  Status (*launch)(const EncodeParams&, const SearchShape&, CudaStream);
  int (*shared_bytes)(int);
  int64_t (*block_bytes)(const SearchShape&);
};
template <int K>
constexpr Search kSearchOf = {launch_search<K>, search_shared_bytes<K>, search_block_bytes<K>};
constexpr Search kSearch[] = {kSearchOf<1>, kSearchOf<2>, kSearchOf<3>, kSearchOf<4>,
                              kSearchOf<5>, kSearchOf<6>, kSearchOf<7>, kSearchOf<8>};

// The fewest tiles side by side that still take all of them at once and fit the device.
SearchShape shape_of(int64_t n_tiles, int bits, int multiprocessors) {
  const Search& search = kSearch[bits - 1];
  const int room = shared_memory().block;
  int tiles = 1;
  while (tiles < most_tiles(bits) && n_tiles > int64_t{tiles} * multiprocessors &&
         search.shared_bytes(2 * tiles) <= room) {
    tiles *= 2;
  }
  const int64_t blocks = std::min<int64_t>(n_tiles, multiprocessors);
  return {tiles, static_cast<int>(blocks), search.shared_bytes(tiles) > room};
}

}  // namespace

int64_t encode_cuda_workspace_bytes(int64_t n_tiles, int bits, int multiprocessors) {
  const SearchShape shape = shape_of(n_tiles, bits, multiprocessors);
  return kHeaderBytes + shape.blocks * kSearch[bits - 1].block_bytes(shape);
}

Status encode_cuda(const EncodeParams& p, CudaStream stream) {
  if (p.bits < 1 || p.bits > 8 || p.threads < 1) return Status::kBadArgument;
  const int64_t n = p.n_tiles * kTileNumel;
  if (n == 0) return Status::kOk;
  const SearchShape shape = shape_of(p.n_tiles, p.bits, p.threads);
  auto* header = reinterpret_cast<SearchHeader*>(p.workspace);
  begin_kernel<<<1, 1, 0, stream>>>(header, n, int64_t{shape.tiles} * shape.blocks);
  check_kernel<<<p.threads, 256, 0, stream>>>(p.tiles, n, header);
  return kSearch[p.bits - 1].launch(p, shape, stream);
}

}  // namespace exl3
