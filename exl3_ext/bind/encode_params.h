// Argument checks of trellis_encode, the same on every device.
#pragma once
#include "bind/check.h"
#include "exl3/encode.h"

namespace exl3::bind {

// The parameters that come from the arguments; outputs, workspace and threads are left out.
inline EncodeParams encode_params(const Tensor& tiles, const Tensor& codebook, const Tensor& table,
                                  double weight_limit, double weight_scale, int64_t gain,
                                  int64_t bits) {
  const char* op = "trellis_encode";
  EXL3_CHECK_DTYPE(op, tiles, Float);
  EXL3_CHECK_CONTIGUOUS(op, tiles);
  EXL3_CHECK_SAME_DEVICE(op, codebook, tiles);
  EXL3_CHECK_SAME_DEVICE(op, table, tiles);
  EXL3_CHECK_DTYPE(op, codebook, Float);
  EXL3_CHECK_CONTIGUOUS(op, codebook);
  EXL3_CHECK_DIM(op, tiles, 2);
  EXL3_CHECK_SIZE(op, tiles, 1, kTileNumel);
  EXL3_CHECK_DIM(op, codebook, 1);
  EXL3_CHECK_SIZE(op, codebook, 0, kStates);
  EXL3_CHECK_DTYPE(op, table, Short);
  EXL3_CHECK_CONTIGUOUS(op, table);
  EXL3_CHECK(op, bits >= 1 && bits <= 8, "bits is ", bits, ", expected 1 to 8");
  const int numbers = bits <= kEncodeCoarseBits ? kStates : 2 * kStates;
  EXL3_CHECK(op, table.numel() == numbers, "table has ", table.numel(), " elements, expected ",
             numbers);
  EncodeParams p{};
  p.tiles = data<float>(tiles);
  p.codebook = data<float>(codebook);
  p.table = data<int16_t>(table);
  p.weight_limit = static_cast<float>(weight_limit);
  p.weight_scale = static_cast<float>(weight_scale);
  p.gain = static_cast<int>(gain);
  p.n_tiles = tiles.size(0);
  p.bits = static_cast<int>(bits);
  return p;
}

// `bad`: the index of the first element of the tiles that is NaN or infinite, or `numel`.
inline void check_finite(int64_t bad, int64_t numel) {
  EXL3_CHECK("trellis_encode", bad >= numel, "tiles[", bad / kTileNumel, ", ", bad % kTileNumel,
             "] is NaN or infinite, expected finite weights");
}

}  // namespace exl3::bind
