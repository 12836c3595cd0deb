#include "cpu/linear_select.h"

namespace exl3 {
namespace {

// Rounding activations to q_max steps a side adds noise of about (2.7 / q_max)^2 / 12 of the output
// power (2.7: the mean peak of 128 Gaussian values). Against the weights' own 4^-bits:
//   mul1, bits <= 4:  127    3.8e-5, under 1 % of 0.0039
//   mul1, bits >= 5:  32512  6e-10 (127 * 256: both bytes of it fit int8)
//   3inst, mcg:       1023   6e-7, 4 % of 4^-8. Their weights fill 15 bits, and 64 products of
//                     15 and 10 bits are what an int32 sum holds.
int q_max(Codebook codebook, int bits) {
  if (codebook != Codebook::kMul1) return 1023;
  return bits <= 4 ? 127 : 32512;
}

// Per 32 weights, bytes cost 2 instructions a row, words 3 and 1 a row.
constexpr int64_t kBytesRows = 1;

}  // namespace

LinearChoice linear_select(Isa isa, Codebook codebook, int bits, int64_t m) {
  const int most = q_max(codebook, bits);
  if (isa >= Isa::kAvx512 && most <= 127 && m <= kBytesRows) return {LinearKernel::kBytes, most};
  return {LinearKernel::kWords, most};
}

}  // namespace exl3
