// Packing, unpacking, decoding and re-ordering of stored tiles: one thread an output word or value.
// Bound: bytes; chosen always (load time and tests; decode_planes.cu serves products).
#include <cuda_runtime.h>

#include "cuda/trellis/values.cuh"
#include "exl3/trellis.h"

namespace exl3 {
namespace {

using namespace cuda;

constexpr int kThreads = 256;
constexpr int kGroupTiles = 4;

__device__ __forceinline__ int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

// Stored words of a tile are the stream, 32 bits at a time, most significant bit first.
__global__ void __launch_bounds__(kThreads) pack_kernel(TrellisPackParams p, int64_t words) {
  const int64_t at = thread_index();
  if (at >= words) return;
  const int64_t tile = at / (8 * p.bits);
  const int first = static_cast<int>(at % (8 * p.bits)) * 32;
  const int32_t* states = p.states + tile * kTileNumel;
  uint32_t word = 0;
  for (int i = 0; i < 32; ++i) {
    const int bit = first + i, position = bit / p.bits;
    const int shift = p.bits - 1 - (bit - position * p.bits);
    word = (word << 1) | ((static_cast<uint32_t>(states[position]) >> shift) & 1u);
  }
  reinterpret_cast<uint32_t*>(p.trellis)[at] = word;
}

__global__ void __launch_bounds__(kThreads) unpack_kernel(TrellisPackParams p, int64_t count) {
  const int64_t at = thread_index();
  if (at >= count) return;
  const uint16_t* words = p.trellis + at / kTileNumel * 16 * p.bits;
  p.states[at] = static_cast<int32_t>(tile_state(words, p.bits, static_cast<int>(at % kTileNumel)));
}

// Position of row r, column c in a tile: the inverse of tile_row and tile_col.
__device__ __forceinline__ int tile_position(int r, int c) {
  const int lane = ((r >> 1) & 3) | ((c & 7) << 2);
  return 8 * lane + ((r & 1) | ((r >> 3) << 1) | ((c >> 3) << 2));
}

template <Codebook kCodebook>
__global__ void __launch_bounds__(kThreads) decode_kernel(TrellisDecodeParams p, int64_t count) {
  const int64_t at = thread_index();
  if (at >= count) return;
  const int64_t row = at / p.n, column = at % p.n;  // rows run on over the batch; k % 16 == 0
  const int64_t tile = row / kTileDim * (p.n / kTileDim) + column / kTileDim;
  const int position =
      tile_position(static_cast<int>(row % kTileDim), static_cast<int>(column % kTileDim));
  const uint32_t state = tile_state(p.trellis + tile * 16 * p.bits, p.bits, position);
  p.w[at] = __half_as_ushort(value_of<kCodebook>(state));
}

// Byte `at` (0..4*bits-1, stream order) of a lane's words: where it lies in memory.
struct LaneByte {
  int64_t group_row;  // [batch][n/64][k/16]
  int bits;

  __device__ __forceinline__ int64_t offset(int lane, int at) const {
    const int vector = bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
    const int word = at >> 2;
    const int64_t stored =
        group_row * 32 * bits + ((word / vector) * 32 + lane) * vector + word % vector;
    return stored * 4 + 3 - (at & 3);
  }
};

// One thread a byte of the stored tiles, in either direction.
template <bool kPrepare>
__global__ void __launch_bounds__(kThreads) reorder_kernel(TrellisPlanesParams p, int64_t count) {
  const int64_t at = thread_index();
  if (at >= count) return;
  const int tile_bytes = 32 * p.bits;
  const int64_t tile = at / tile_bytes;
  const int stored = static_cast<int>(at - tile * tile_bytes), stream = stored ^ 3;
  const int64_t column = tile % p.n_tiles, row = tile / p.n_tiles % p.k_tiles;
  const int64_t batch = tile / (p.n_tiles * p.k_tiles);
  const int64_t groups = p.n_tiles / kGroupTiles;
  const LaneByte place{(batch * groups + column / kGroupTiles) * p.k_tiles + row, p.bits};
  const int lane = stream / p.bits;
  const int in_lane = static_cast<int>(column % kGroupTiles) * p.bits + stream - lane * p.bits;
  const int64_t other = place.offset(lane, in_lane);
  const auto* from = reinterpret_cast<const unsigned char*>(p.from);
  auto* to = reinterpret_cast<unsigned char*>(p.to);
  if (kPrepare) {
    to[other] = from[at];
  } else {
    to[at] = from[other];
  }
}

template <class P>
Status start(void (*kernel)(P, int64_t), const P& p, int64_t count, CudaStream stream) {
  if (count == 0) return Status::kOk;
  const int64_t grid = (count + kThreads - 1) / kThreads;
  if (grid > 0x7FFFFFFF) return Status::kBadArgument;
  kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(p, count);
  return cudaPeekAtLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

}  // namespace

Status trellis_pack_cuda(const TrellisPackParams& p, CudaStream stream) {
  return start(pack_kernel, p, p.tiles * 8 * p.bits, stream);
}

Status trellis_unpack_cuda(const TrellisPackParams& p, CudaStream stream) {
  return start(unpack_kernel, p, p.tiles * kTileNumel, stream);
}

Status trellis_decode_cuda(const TrellisDecodeParams& p, CudaStream stream) {
  const int64_t count = p.batch * p.k * p.n;
  switch (p.codebook) {
    case Codebook::k3inst:
      return start(decode_kernel<Codebook::k3inst>, p, count, stream);
    case Codebook::kMcg:
      return start(decode_kernel<Codebook::kMcg>, p, count, stream);
    case Codebook::kMul1:
      return start(decode_kernel<Codebook::kMul1>, p, count, stream);
  }
  return Status::kNoKernel;
}

Status trellis_prepare_cuda(const TrellisPlanesParams& p, CudaStream stream) {
  if (p.n_tiles % kGroupTiles != 0) return Status::kBadArgument;
  return start(reorder_kernel<true>, p, p.batch * p.k_tiles * p.n_tiles * 32 * p.bits, stream);
}

Status trellis_restore_cuda(const TrellisPlanesParams& p, CudaStream stream) {
  if (p.n_tiles % kGroupTiles != 0) return Status::kBadArgument;
  return start(reorder_kernel<false>, p, p.batch * p.k_tiles * p.n_tiles * 32 * p.bits, stream);
}

}  // namespace exl3
