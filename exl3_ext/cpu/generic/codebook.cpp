// Codebook tables. Every step before the last rounding is exact in float32: the halves of 3inst and
// mcg lie in 2^-3 .. 2 (so their sum needs at most 15 bits), and the product and sum of mul1 are
// multiples of 2^-18 below 16 (22 bits).
#include "cpu/generic/codebook.h"

#include "cpu/generic/half.h"
#include "exl3/codebook.h"

namespace exl3::generic {
namespace {

constexpr int kStates = 65536;

half_bits value(Codebook codebook, uint32_t state) {
  if (codebook == Codebook::kMul1) {
    const float sum = static_cast<float>(kMul1Bias + static_cast<int>(mul1_byte_sum(state)));
    const float product = sum * half_to_float(kMul1ScaleBits);
    return float_to_half(product + half_to_float(kMul1OffsetBits));
  }
  const uint32_t pair = half_pair(codebook, state);
  return float_to_half(half_to_float(static_cast<half_bits>(pair & 0xFFFF)) +
                       half_to_float(static_cast<half_bits>(pair >> 16)));
}

struct Values {
  half_bits v[kStates];
  explicit Values(Codebook codebook) {
    for (uint32_t s = 0; s < kStates; ++s) v[s] = value(codebook, s);
  }
};

}  // namespace

const half_bits* codebook_values(Codebook codebook) {
  switch (codebook) {
    case Codebook::k3inst: {
      static const Values values(Codebook::k3inst);
      return values.v;
    }
    case Codebook::kMcg: {
      static const Values values(Codebook::kMcg);
      return values.v;
    }
    default: {
      static const Values values(Codebook::kMul1);
      return values.v;
    }
  }
}

}  // namespace exl3::generic
