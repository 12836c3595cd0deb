#include "cpu/linear_select.h"

namespace exl3 {
namespace {

// Rounding activations to q_max steps a side adds noise of about (2.7 / q_max)^2 / 12 of the output
// power (2.7: the mean peak of 128 Gaussian values). Against the weights' own 4^-bits:
//   mul1, bits <= 4:  127    3.8e-5, under 1 % of 0.0039
//   mul1, bits >= 5:  32512  6e-10 (127 * 256: both bytes of it fit int8)
//   3inst, mcg:       511    2.3e-6, 15 % of 4^-8. Their weights are below 32760, and 128 * 511 *
//                     32760 is what an int32 sum holds.
int q_max(Codebook codebook, int bits) {
  if (codebook != Codebook::kMul1) return 511;
  return bits <= 4 ? 127 : 32512;
}

// Measured at 576 -> 2 x 1536, 4 bits, one thread of a Xeon with AMX; microseconds a call:
//   rows             1    2    4    8    16   17   32   48
//   bytes, words     76   105  130  201  336  -    599  890
//   tiles            -    137  146  191  198  305  384  570
//   many             -    201  206  211  224  284  314  391
// On bytes a row costs 2 instructions per 32 weights, on words 1 and 3 for all rows.
constexpr int64_t kBytesRows = 1;
constexpr int64_t kTilesRows = 5;  // from

constexpr int64_t kManyRows = 17;  // from

}  // namespace

LinearChoice linear_select(Isa isa, Codebook codebook, int bits, int64_t m) {
  const int most = q_max(codebook, bits), planes = most > 127 ? 2 : 1;
  if (isa >= Isa::kAmx && m >= kManyRows) return {LinearKernel::kMany, most, planes};
  if (isa >= Isa::kAmx && codebook == Codebook::kMul1 && m >= kTilesRows) {
    return {LinearKernel::kTiles, most, planes};
  }
  if (isa >= Isa::kAvx512 && planes == 1 && m <= kBytesRows) {
    return {LinearKernel::kBytes, most, planes};
  }
  return {LinearKernel::kWords, most, planes};
}

}  // namespace exl3
