// out = softmax(softcap(scale * q k^T) + mask) v over a paged cache, float16 or quantised.
// Work split: a block takes a tile of rows of one kv head (its q heads share every key it reads)
// and a chunk of the keys, 4 warps, keys in tiles of 64 through shared memory, two ahead. Few rows
// (decode): 16 rows, the warps split the keys; many: 64 rows, the warps split the rows. Products on
// tensor cores with float32 sums; the softmax is online. Chunks are summed in order by the block
// that finishes last, so results repeat bit for bit. Shared memory: 75 KB at head dim 128, 39 KB
// and the words of two tiles (2 KB a bit of K and V) for a quantised cache. Bound: bytes of K and V
// in decode (quantised: decoding them), tensor cores in prefill. Needs sm_80.
#include <cuda_runtime.h>

#include <atomic>

#include "cuda/attention/attention.cuh"

namespace exl3 {
namespace {

using namespace cuda;

constexpr int64_t kDecodeBlocks = 2048;  // chunks fill up to so many blocks
constexpr int64_t kPrefillBlocks = 528;
constexpr int kDevices = 64;

// Lets a kernel have up to `most` bytes of shared memory, or what the device has; -1 on an error.
int allow_shared(const void* kernel, int device, int most) {
  int room = 0;
  if (cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
      cudaSuccess) {
    return -1;
  }
  if (most > room) most = room;
  const auto size = cudaFuncAttributeMaxDynamicSharedMemorySize;
  return cudaFuncSetAttribute(kernel, size, most) == cudaSuccess ? most : -1;
}

template <int D, bool kDecode, bool kQuant>
Status start(const AttentionCudaParams& p, CudaStream stream) {
  using Shape = AttentionShape<D, kDecode, kQuant>;
  auto* kernel = attention_kernel<D, kDecode, kQuant>;
  static std::atomic<int> allowed[kDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return Status::kDeviceError;
  int most = device < kDevices ? allowed[device].load(std::memory_order_relaxed) : 0;
  if (most == 0) {
    most = allow_shared(reinterpret_cast<const void*>(kernel), device, Shape::kMostBytes);
    if (most < 0) return Status::kDeviceError;
    if (device < kDevices) allowed[device].store(most, std::memory_order_relaxed);
  }
  const int bytes = Shape::kBytes + (kQuant ? quant_tile_bytes(p.a) : 0);
  if (bytes > most) return Status::kNoKernel;
  const dim3 grid(static_cast<unsigned>(p.tiles * p.a.kv_heads),
                  static_cast<unsigned>(p.max_chunks));
  kernel<<<grid, kAttentionThreads, bytes, stream>>>(p);
  return launch_status();
}

template <bool kDecode, bool kQuant>
Status start_for_dim(const AttentionCudaParams& p, CudaStream stream) {
  const int dim = p.a.head_dim > p.a.v_head_dim ? p.a.head_dim : p.a.v_head_dim;
  if (dim <= 64) return start<64, kDecode, kQuant>(p, stream);
  if (dim <= 96) return start<96, kDecode, kQuant>(p, stream);
  if (dim <= 128) return start<128, kDecode, kQuant>(p, stream);
  if (dim <= 192) return start<192, kDecode, kQuant>(p, stream);
  if (dim <= 256) return start<256, kDecode, kQuant>(p, stream);
  return Status::kNoKernel;
}

}  // namespace

void plan_attention_cuda(AttentionCudaParams& p) {
  const Attention<void>& a = p.a;
  const int64_t rows = a.rows * (a.q_heads / a.kv_heads);
  const bool decode = rows <= 16 * a.sequences;
  p.tile_rows = decode ? 16 : 64;
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
  const bool decode = p.tile_rows == 16;
  if (a.k_quant.bits) {
    return decode ? start_for_dim<true, true>(p, stream) : start_for_dim<false, true>(p, stream);
  }
  return decode ? start_for_dim<true, false>(p, stream) : start_for_dim<false, false>(p, stream);
}

}  // namespace exl3
