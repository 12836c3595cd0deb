// Launches of the one-launch decode step: instances by dtype, head dim and rows.
#include <atomic>

#include "cuda/attention/decode.cuh"
#include "cuda/common/device.h"

namespace exl3 {
namespace {

using namespace cuda;

constexpr int kMostDevices = 64;
constexpr int kClusterSizes = 5;  // 1, 2, 4, 8, 16

int largest_dim(const DecodeAttentionParams& p) {
  return p.head_dim > p.v_head_dim ? p.head_dim : p.v_head_dim;
}

int rows_of_sequence(const DecodeAttentionParams& p) {
  return p.queries * (p.q_heads / p.kv_heads);
}

// Tiles of 8 rows that a cluster takes: two if there are more rows than 8 and registers for them.
int row_tiles(const DecodeAttentionParams& p) {
  return largest_dim(p) <= 128 && rows_of_sequence(p) > 8 ? 2 : 1;
}

int64_t clusters(const DecodeAttentionParams& p) {
  const int most = 8 * row_tiles(p);
  return p.sequences * p.kv_heads * ((rows_of_sequence(p) + most - 1) / most);
}

template <class T, int D, int kTiles>
struct Instance {
  static constexpr auto* kKernel = decode_attention_kernel<T, D, kTiles>;

  static constexpr int kRows = 8 * kTiles;  // most of a cluster
  static int rows(const DecodeAttentionParams& p) {
    return rows_of_sequence(p) < kRows ? rows_of_sequence(p) : kRows;
  }
  static int bytes(int rows, int v_dim, int cluster) {
    return DecodeShape<D, kTiles>::bytes(rows, v_dim, cluster);
  }

  static cudaLaunchConfig_t config(int64_t clusters, int cluster, int bytes,
                                   cudaLaunchAttribute (&attributes)[2]) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c{};
    c.gridDim = dim3(static_cast<unsigned>(clusters * cluster));
    c.blockDim = dim3(kDecodeThreads);
    c.dynamicSmemBytes = static_cast<size_t>(bytes);
    c.attrs = attributes;
    c.numAttrs = 2;
    return c;
  }

  // Clusters of each size, with so many rows, that run at once on a device, and bytes of a thread
  // block; false: none.
  static bool find_room(int rows, int (&room)[kClusterSizes], int& limit) {
    limit = shared_memory().block;
    if (capability() < 90) return false;
    const auto size = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const auto large = cudaFuncAttributeNonPortableClusterSizeAllowed;
    if (cudaFuncSetAttribute(kKernel, size, limit) != cudaSuccess ||
        cudaFuncSetAttribute(kKernel, large, 1) != cudaSuccess) {
      return false;
    }
    for (int i = 0; i < kClusterSizes; ++i) {
      cudaLaunchAttribute attributes[2] = {};
      cudaLaunchConfig_t c = config(1, 1 << i, bytes(rows, D, 1 << i), attributes);
      c.numAttrs = 1;
      if (cudaOccupancyMaxActiveClusters(&room[i], kKernel, &c) != cudaSuccess) room[i] = 0;
    }
    cudaGetLastError();
    return true;
  }

  // The largest cluster with which all run at once, else the smallest that has the memory; 0: no
  // such kernel on this device.
  static int plan(const DecodeAttentionParams& p) {
    // By rows; the last: bytes, -1: none.
    static std::atomic<int> known[kMostDevices][kRows][kClusterSizes + 1];
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return 0;
    auto& own = known[device][rows(p) - 1];
    if (own[kClusterSizes].load() == 0) {
      int room[kClusterSizes] = {}, limit = 0;
      const bool found = find_room(rows(p), room, limit);
      for (int i = 0; i < kClusterSizes; ++i) own[i].store(room[i]);
      own[kClusterSizes].store(found ? limit : -1);
    }
    const int64_t wanted = clusters(p);
    int i = kClusterSizes - 1;
    while (i > 0 && wanted > own[i].load()) --i;
    for (; i < kClusterSizes; ++i) {
      const bool runs = i == 0 || own[i].load() > 0;
      if (runs && bytes(rows(p), p.v_head_dim, 1 << i) <= own[kClusterSizes].load()) {
        return 1 << i;
      }
    }
    return 0;
  }

  static Status start(const DecodeAttentionParams& p, CudaStream stream) {
    cudaLaunchAttribute attributes[2] = {};
    const int shared = bytes(rows(p), p.v_head_dim, p.cluster);
    cudaLaunchConfig_t c = config(clusters(p), p.cluster, shared, attributes);
    c.stream = stream;
    return cudaLaunchKernelEx(&c, kKernel, p) == cudaSuccess ? Status::kOk : Status::kDeviceError;
  }
};

// visit(Instance) of the one that serves these sizes.
template <class T, class Visit>
auto with_dim(const DecodeAttentionParams& p, const Visit& visit) {
  const int dim = largest_dim(p);
  const bool two = row_tiles(p) == 2;
  if (dim <= 64) return two ? visit(Instance<T, 64, 2>()) : visit(Instance<T, 64, 1>());
  if (dim <= 128) return two ? visit(Instance<T, 128, 2>()) : visit(Instance<T, 128, 1>());
  return visit(Instance<T, 256, 1>());
}
template <class Visit>
auto with_instance(const DecodeAttentionParams& p, const Visit& visit) {
  return p.dtype == DType::kFloat16 ? with_dim<__half>(p, visit) : with_dim<float>(p, visit);
}

bool aligned16(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// What a lane loads is 16 bytes, and the halves of a head that turn into each other are its own.
bool fits_lanes(const DecodeAttentionParams& p) {
  const int64_t size = p.dtype == DType::kFloat16 ? 2 : 4;
  const bool turns = p.rot % (p.interleaved ? 8 : 64) == 0 && aligned16(p.table);
  return turns && p.head_dim % 8 == 0 && p.v_head_dim % 8 == 0 && p.stride * size % 16 == 0 &&
         aligned16(p.qkv) && aligned16(p.k_cache) && aligned16(p.v_cache);
}

}  // namespace

int plan_decode_attention(const DecodeAttentionParams& p) {
  if (p.sequences < 1 || p.queries < 1 || p.queries > kStepKeys) return 0;
  if (largest_dim(p) > 256 || !fits_lanes(p)) return 0;
  return with_instance(p, [&](auto instance) { return instance.plan(p); });
}

Status decode_attention_cuda(const DecodeAttentionParams& p, CudaStream stream) {
  return with_instance(p, [&](auto instance) { return instance.start(p, stream); });
}

}  // namespace exl3
