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
                                          const Tensor& table, double weight_limit,
                                          double weight_scale, int64_t gain, int64_t bits) {
  const char* op = "trellis_encode";
  EXL3_CHECK_ARG(op, tiles, Float);
  EXL3_CHECK_ARG(op, codebook, Float);
  EXL3_CHECK_DIM(op, tiles, 2);
  EXL3_CHECK_SIZE(op, tiles, 1, kTileNumel);
  EXL3_CHECK_DIM(op, codebook, 1);
  EXL3_CHECK_SIZE(op, codebook, 0, kStates);
  EXL3_CHECK_ARG(op, table, Short);
  EXL3_CHECK(op, table.numel() == 2 * kStates, "table has ", table.numel(), " elements, expected ",
             2 * kStates);
  EXL3_CHECK(op, bits >= 1 && bits <= 8, "bits is ", bits, ", expected 1 to 8");
  const int64_t bad = first_not_finite(tiles);
  EXL3_CHECK(op, bad < 0, "tiles[", bad / kTileNumel, ", ", bad % kTileNumel,
             "] is NaN or infinite, expected finite weights");

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
  p.table = data<int16_t>(table);
  p.weight_limit = static_cast<float>(weight_limit);
  p.weight_scale = static_cast<float>(weight_scale);
  p.gain = static_cast<int>(gain);
  p.trellis = data_mut<uint16_t>(trellis);
  p.values = data_mut<float>(values);
  p.workspace = data_mut<unsigned char>(workspace);
  launch(op, encode_cpu, p, {tiles, codebook, table, trellis, values, workspace});
  return {trellis, values};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) { m.impl("trellis_encode", TORCH_BOX(&trellis_encode)); }

}  // namespace exl3::bind
