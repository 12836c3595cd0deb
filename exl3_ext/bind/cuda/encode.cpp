#include "exl3/encode.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "bind/cuda/guard.h"
#include "bind/encode_params.h"

namespace exl3::bind {
namespace {

std::tuple<Tensor, Tensor> trellis_encode(const Tensor& tiles, const Tensor& codebook,
                                          const Tensor& table, double weight_limit,
                                          double weight_scale, int64_t gain, int64_t bits,
                                          bool check) {
  const char* op = "trellis_encode";
  EncodeParams p = encode_params(tiles, codebook, table, weight_limit, weight_scale, gain, bits);
  EXL3_CHECK_CUDA(op, tiles);
  Tensor trellis = torch::stable::new_empty(tiles, {p.n_tiles, 16 * bits}, ScalarType::Short);
  Tensor values = torch::stable::empty_like(tiles);
  if (p.n_tiles == 0) return {trellis, values};
  const CudaLaunch launch(tiles);
  cudaDeviceGetAttribute(&p.threads, cudaDevAttrMultiProcessorCount, tiles.get_device_index());
  Tensor workspace = torch::stable::new_empty(
      tiles, {encode_cuda_workspace_bytes(p.n_tiles, p.bits, p.threads)}, ScalarType::Byte);
  p.trellis = data_mut<uint16_t>(trellis);
  p.values = data_mut<float>(values);
  p.workspace = data_mut<unsigned char>(workspace);
  launch.run(op, encode_cuda, p);
  if (!check) return {trellis, values};  // nothing is waited for
  int64_t bad = 0;
  cudaMemcpyAsync(&bad, p.workspace, sizeof bad, cudaMemcpyDeviceToHost, launch.stream());
  const cudaError_t error = cudaStreamSynchronize(launch.stream());
  EXL3_CHECK(op, error == cudaSuccess, cudaGetErrorString(error));
  check_finite(bad, tiles.numel());
  return {trellis, values};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) { m.impl("trellis_encode", TORCH_BOX(&trellis_encode)); }

}  // namespace exl3::bind
