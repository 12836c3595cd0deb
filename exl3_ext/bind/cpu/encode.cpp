#include "exl3/encode.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <tuple>

#include "bind/cpu/launch.h"
#include "bind/encode_params.h"
#include "cpu/threads.h"

namespace exl3::bind {
namespace {

// The index of the first element that is NaN or infinite, or numel.
int64_t first_not_finite(const Tensor& t) {
  const float* x = data<float>(t);
  for (int64_t i = 0; i < t.numel(); ++i)
    if (!std::isfinite(x[i])) return i;
  return t.numel();
}

std::tuple<Tensor, Tensor> trellis_encode(const Tensor& tiles, const Tensor& codebook,
                                          const Tensor& table, double weight_limit,
                                          double weight_scale, int64_t gain, int64_t bits,
                                          bool check) {
  const char* op = "trellis_encode";
  EXL3_CHECK_ARG(op, tiles, Float);
  EncodeParams p = encode_params(tiles, codebook, table, weight_limit, weight_scale, gain, bits);
  if (check) check_finite(first_not_finite(tiles), tiles.numel());
  p.threads = num_threads();
  Tensor trellis = torch::stable::new_empty(tiles, {p.n_tiles, 16 * bits}, ScalarType::Short);
  Tensor values = torch::stable::empty_like(tiles);
  Tensor workspace = torch::stable::new_empty(
      tiles, {p.n_tiles ? p.threads * encode_workspace_bytes(p.bits) : 0}, ScalarType::Byte);
  p.trellis = data_mut<uint16_t>(trellis);
  p.values = data_mut<float>(values);
  p.workspace = data_mut<unsigned char>(workspace);
  launch(op, encode_cpu, p, {tiles, codebook, table, trellis, values, workspace});
  return {trellis, values};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) { m.impl("trellis_encode", TORCH_BOX(&trellis_encode)); }

}  // namespace exl3::bind
