// Launches of the small-batch product: instances by bit rate, kind of product and fragments.
#include <algorithm>

#include "cuda/common/bits.h"
#include "cuda/common/device.h"
#include "cuda/gemv/gemv.cuh"
#include "cuda/gemv/gemv_input.cuh"

namespace exl3 {
namespace {

using namespace cuda;

// Thread blocks of a multiprocessor, which caps registers: 64, 80 or 128 a thread.
constexpr int gemv_blocks(bool integer, int fragments) {
  if (integer) return fragments == 1 ? 4 : fragments == 2 ? 3 : 2;
  return fragments == 1 ? 3 : 2;
}

void* at_row(const Rows& rows, int64_t row) {
  if (rows.data == nullptr) return nullptr;
  const int64_t size = rows.type == DType::kFloat32 ? 4 : 2;
  return static_cast<char*>(rows.data) + row * rows.stride * size;
}

// `grid` thread blocks in clusters; may start while the launch before ends.
template <class Kernel, class... Args>
Status start(Kernel* kernel, dim3 grid, int threads, int cluster, int shared_bytes,
             CudaStream stream, const Args&... args) {
  if (shared_bytes > 40 * 1024 &&  // 48 KiB with the static part
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) !=
          cudaSuccess) {
    return Status::kDeviceError;
  }
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (gemv_device().clusters) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.numAttrs = 2;
  }
  return cudaLaunchKernelEx(&config, kernel, args...) == cudaSuccess ? Status::kOk
                                                                     : Status::kDeviceError;
}

// Shared memory that keeps more thread blocks than needed from one multiprocessor: a few clusters
// would else fill some and leave others idle. One more than an even share has room, since a cluster
// must lie in one group of multiprocessors.
int spreading_bytes(unsigned grid) {
  constexpr int kReserved = 1024;  // of each thread block
  const GemvDevice device = gemv_device();
  if (!device.clusters) return 0;
  const int count = device.multiprocessors;
  const int wanted = (static_cast<int>(grid) + count - 1) / count + 1;
  const int fixed = static_cast<int>(sizeof(GemvScales) + sizeof(GemvOutputs)) + kReserved;
  return device.shared_bytes_all / (wanted + 1) - fixed + 16;
}

template <class Input>
Status run_input(const GemvParams& p, CudaStream stream) {
  const int64_t bytes = p.count * (p.k / kTileDim) * Input::kStepWords * 4;
  const dim3 rows(static_cast<unsigned>(p.m), static_cast<unsigned>(p.count));
  return start(gemv_input_kernel<Input>, rows, kInputWarps * kWarp, 1, 0, stream, p, bytes);
}

template <class Product, int kBits>
Status run(const GemvParams& p, const GemvShared& sizes, unsigned grid, CudaStream stream) {
  using Input = typename Product::Input;
  if (!gemv_fused(static_cast<int>(p.m))) {
    const Status status = run_input<Input>(p, stream);
    if (status != Status::kOk) return status;
  }
  constexpr int kFragments = Input::kStepWords / (Input::kInteger ? kWarp : 2 * kWarp);
  return start(gemv_kernel<kBits, Product, gemv_blocks(Input::kInteger, kFragments)>, dim3(grid),
               kGemvThreads, p.config.cluster, sizes.total, stream, p, sizes);
}

template <int kBits>
Status pick(const GemvParams& p, const GemvShared& sizes, unsigned grid, CudaStream stream) {
  if (p.w[0].codebook == Codebook::kMul1) {
    switch (p.config.fragments) {
      case 1:
        return run<IntegerProduct<kBits, 1>, kBits>(p, sizes, grid, stream);
      case 2:
        return run<IntegerProduct<kBits, 2>, kBits>(p, sizes, grid, stream);
      case 4:
        return run<IntegerProduct<kBits, 4>, kBits>(p, sizes, grid, stream);
    }
    return Status::kNoKernel;
  }
  switch (p.config.fragments) {
    case 1:
      return run<HalfProduct<kBits, 1>, kBits>(p, sizes, grid, stream);
    case 2:
      return run<HalfProduct<kBits, 2>, kBits>(p, sizes, grid, stream);
  }
  return Status::kNoKernel;
}

}  // namespace

GemvDevice gemv_device() {
  constexpr int kDevices = 32;
  static GemvDevice known[kDevices] = {};
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess || index >= kDevices) index = 0;
  GemvDevice& d = known[index];
  if (d.multiprocessors == 0) {
    GemvDevice found{};
    const SharedMemory has = shared_memory();
    found.shared_bytes = has.block - static_cast<int>(sizeof(GemvScales) + sizeof(GemvOutputs));
    found.shared_bytes_all = has.processor;
    found.clusters = capability() >= 90;
    cudaDeviceGetAttribute(&found.multiprocessors, cudaDevAttrMultiProcessorCount, index);
    d = found;
  }
  return d;
}

int64_t gemv_input_bytes(const LinearGroup& group, const GemvConfig& config) {
  const bool integer = group.w[0].codebook == Codebook::kMul1;
  const int64_t words =
      group.count * (group.k / kTileDim) * gemv_step_bytes(integer, config.fragments);
  return words + (2 * group.count + 1) * kGemvMaxRows * 4;
}

int64_t gemv_workspace_bytes(const LinearGroup& group, const GemvConfig& config) {
  if (gemv_fused(static_cast<int>(std::min<int64_t>(group.m, config.rows)))) return 0;
  return gemv_input_bytes(group, config);
}

Status gemv_input_cuda(const GemvParams& p, CudaStream stream) {
  const bool integer = p.w[0].codebook == Codebook::kMul1;
  switch (p.config.fragments) {
    case 1:
      return integer ? run_input<IntegerInput<1>>(p, stream) : run_input<HalfInput<1>>(p, stream);
    case 2:
      return integer ? run_input<IntegerInput<2>>(p, stream) : run_input<HalfInput<2>>(p, stream);
    case 4:
      return integer ? run_input<IntegerInput<4>>(p, stream) : Status::kNoKernel;
  }
  return Status::kNoKernel;
}

Status gemv_cuda(const GemvParams& params, CudaStream stream) {
  const GemvConfig& config = params.config;
  if (config.rows < 1 || params.k % kHadamardDim != 0) return Status::kNoKernel;
  const bool pair = params.activation >= 0;
  int64_t units = 0;
  for (int i = 0; i < (pair ? 1 : params.count); ++i) units += params.w[i].n / kHadamardDim;
  for (int64_t row = 0; row < params.m; row += config.rows) {
    GemvParams p = params;
    p.m = std::min<int64_t>(config.rows, params.m - row);
    p.x.data = at_row(params.x, row);
    p.y.data = at_row(params.y, row);
    p.residual.data = at_row(params.residual, row);
    const auto grid = static_cast<unsigned>(units * config.cluster);
    GemvShared sizes =
        gemv_shared(p.w[0].codebook == Codebook::kMul1, pair, p.w[0].bits, config.fragments,
                    config.rows, static_cast<int>(p.k / kHadamardDim), config.cluster);
    sizes.total = std::max(sizes.total, spreading_bytes(grid));
    const Status status =
        for_bits(p.w[0].bits, [&]<int kBits>() { return pick<kBits>(p, sizes, grid, stream); });
    if (status != Status::kOk) return status;
  }
  return Status::kOk;
}

}  // namespace exl3
