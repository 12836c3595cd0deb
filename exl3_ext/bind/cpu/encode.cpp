#include "exl3/encode.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <tuple>

#include "bind/cpu/launch.h"
#include "cpu/threads.h"

namespace exl3::bind {
namespace {

// The index of the first element that is NaN or infinite, or -1.
int64_t first_not_finite(const Tensor& t) {
  const float* x = data<float>(t);
  for (int64_t i = 0; i < t.numel(); ++i)
    if (!std::isfinite(x[i])) return i;
  return -1;
}

std::tuple<Tensor, Tensor> trellis_encode(const Tensor& tiles, const Tensor& codebook,
                                          int64_t bits) {
  const char* op = "trellis_encode";
  EXL3_CHECK_ARG(op, tiles, Float);
  EXL3_CHECK_ARG(op, codebook, Float);
  EXL3_CHECK_DIM(op, tiles, 2);
  EXL3_CHECK_SIZE(op, tiles, 1, kTileNumel);
  EXL3_CHECK_DIM(op, codebook, 1);
  EXL3_CHECK_SIZE(op, codebook, 0, kStates);
  EXL3_CHECK(op, bits >= 1 && bits <= 8, "bits is ", bits, ", expected 1 to 8");
  const int64_t bad = first_not_finite(tiles);
  EXL3_CHECK(op, bad < 0, "tiles[", bad / kTileNumel, ", ", bad % kTileNumel,
             "] is NaN or infinite, expected finite weights");
  EXL3_CHECK(op, first_not_finite(codebook) < 0, "codebook has a NaN or an infinity");

  EncodeParams p{};
  p.n_tiles = tiles.size(0);
  p.bits = static_cast<int>(bits);
  p.threads = num_threads();
  Tensor trellis = torch::stable::new_empty(tiles, {p.n_tiles, 16 * bits}, ScalarType::Short);
  Tensor values = torch::stable::empty_like(tiles);
  Tensor workspace = torch::stable::new_empty(
      tiles, {p.n_tiles ? p.threads * encode_workspace_bytes(p.bits) : 0}, ScalarType::Byte);
  p.tiles = data<float>(tiles);
  p.codebook = data<float>(codebook);
  p.trellis = data_mut<uint16_t>(trellis);
  p.values = data_mut<float>(values);
  p.workspace = data_mut<unsigned char>(workspace);
  launch(op, encode_cpu, p, {tiles, codebook, trellis, values, workspace});
  return {trellis, values};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) { m.impl("trellis_encode", TORCH_BOX(&trellis_encode)); }

}  // namespace exl3::bind
