// out = softmax(softcap(scale * q k^T) + mask) v over a paged cache, float16 or quantised.
// Work split: a block takes a tile of rows of one kv head (its q heads share every key it reads)
// and a chunk of the keys, 4 warps, keys in tiles of 64 through shared memory, two ahead. Few rows
// (decode): 16 rows, the warps split the keys; many: 64 rows, the warps split the rows. Products on
// tensor cores with float32 sums; the softmax is online. Chunks are summed in order by the block
// that finishes last, so results repeat bit for bit. Shared memory: 75 KB at head dim 128, 39 KB
// and the words of two tiles (2 KB a bit of K and V) for a quantised cache. Where the device has
// less (64 KB at compute capability 7.5, 99 KB at 8.6, 8.9 and 12.0): always 16 rows, 2 warps and
// tiles of 32 keys, at most 58 KB. Bound: bytes of K and V in decode (quantised: decoding them),
// tensor cores in prefill.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "cuda/attention/attention.cuh"
#include "cuda/common/device.h"

namespace exl3 {
namespace {

using namespace cuda;

constexpr int64_t kDecodeBlocks = 2048;  // chunks fill up to so many blocks
constexpr int64_t kPrefillBlocks = 528;
constexpr int kDevices = 64;

// visit(shape) of the instance for these dims; `none` if there is none.
template <bool kDecode, bool kQuant, class T, class Visit>
T with_dim(const Attention<void>& a, T none, const Visit& visit) {
  const int dim = a.head_dim > a.v_head_dim ? a.head_dim : a.v_head_dim;
  if (dim <= 64) return visit(AttentionShape<64, kDecode, kQuant>());
  if (dim <= 96) return visit(AttentionShape<96, kDecode, kQuant>());
  if (dim <= 128) return visit(AttentionShape<128, kDecode, kQuant>());
  if (dim <= 192) return visit(AttentionShape<192, kDecode, kQuant>());
  if (dim <= 256) return visit(AttentionShape<256, kDecode, kQuant>());
  return none;
}
template <bool kQuant, class T, class Visit>
T with_small(const Attention<void>& a, T none, const Visit& visit) {
  const int dim = a.head_dim > a.v_head_dim ? a.head_dim : a.v_head_dim;
  if (dim <= 128) return visit(AttentionShape<128, true, kQuant, kSmallKeys>());
  if (dim <= 256) return visit(AttentionShape<256, true, kQuant, kSmallKeys>());
  return none;
}
template <class T, class Visit>
T with_shape(const Attention<void>& a, bool decode, T none, const Visit& visit) {
  if (a.k_quant.bits) {
    return decode ? with_dim<true, true>(a, none, visit) : with_dim<false, true>(a, none, visit);
  }
  return decode ? with_dim<true, false>(a, none, visit) : with_dim<false, false>(a, none, visit);
}

template <class Shape>
Status start(const AttentionCudaParams& p, CudaStream stream) {
  static std::atomic<int> allowed[kDevices];  // bytes of shared memory; 0: not asked for yet
  auto* kernel = attention_kernel<Shape>;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return Status::kDeviceError;
  int most = allowed[device].load(std::memory_order_relaxed);
  if (most == 0) {
    const auto size = cudaFuncAttributeMaxDynamicSharedMemorySize;
    most = std::min(Shape::kMostBytes, shared_memory().block);
    if (cudaFuncSetAttribute(kernel, size, most) != cudaSuccess) return Status::kDeviceError;
    allowed[device].store(most, std::memory_order_relaxed);
  }
  const int bytes = Shape::bytes(p.a);
  if (bytes > most) return Status::kNoKernel;
  const dim3 grid(static_cast<unsigned>(p.tiles * p.a.kv_heads),
                  static_cast<unsigned>(p.max_chunks));
  kernel<<<grid, Shape::kThreads, bytes, stream>>>(p);
  return launch_status();
}

}  // namespace

void plan_attention_cuda(AttentionCudaParams& p) {
  const Attention<void>& a = p.a;
  const int64_t rows = a.rows * (a.q_heads / a.kv_heads);
  const bool decode = rows <= 16 * a.sequences;
  const int bytes = with_shape(a, decode, 0, [&](auto shape) { return shape.bytes(a); });
  p.small = bytes > shared_memory().block;
  p.tile_rows = decode || p.small ? 16 : 64;
  p.tiles = rows / p.tile_rows + a.sequences;
  const int64_t blocks = p.tiles * a.kv_heads;
  const int64_t longest = a.max_pages * kPageSize;
  int64_t chunks = blocks ? (decode ? kDecodeBlocks : kPrefillBlocks) / blocks : 1;
  if (chunks > longest / kLeastChunk) chunks = longest / kLeastChunk;
  if (chunks > kMostChunks) chunks = kMostChunks;
  p.max_chunks = chunks < 1 ? 1 : static_cast<int>(chunks);
}

Status attention_cuda(const AttentionCudaParams& p, CudaStream stream) {
  const Attention<void>& a = p.a;
  if (a.rows == 0) return Status::kOk;
  if (a.head_dim % kVector || a.v_head_dim % kVector) return Status::kNoKernel;
  if (a.sequences == 0) {
    const size_t size = p.dtype == DType::kFloat16 ? 2 : 4;
    const size_t bytes = static_cast<size_t>(a.rows) * a.q_heads * a.v_head_dim * size;
    return cudaMemsetAsync(a.out, 0, bytes, stream) == cudaSuccess ? Status::kOk
                                                                   : Status::kDeviceError;
  }
  const auto run = [&](auto shape) { return start<decltype(shape)>(p, stream); };
  if (!p.small) return with_shape(a, p.tile_rows == 16, Status::kNoKernel, run);
  return a.k_quant.bits ? with_small<true>(a, Status::kNoKernel, run)
                        : with_small<false>(a, Status::kNoKernel, run);
}

}  // namespace exl3
