// In place of exl3_ext/cuda/common/halves.cuh. A product of two float16 and a sum fit a double.
#pragma once
#include "cuda_fp16.h"

namespace exl3::cuda {

template <class Bound>
uint32_t each_half(uint32_t a, uint32_t b, uint32_t c, Bound bound) {
  const auto half = [](uint32_t bits) {
    const auto low = static_cast<uint16_t>(bits);
    _Float16 value;
    std::memcpy(&value, &low, sizeof value);
    return static_cast<double>(value);
  };
  uint32_t result = 0;
  for (int at = 0; at < 32; at += 16) {
    const auto value = static_cast<_Float16>(bound(half(a >> at) * half(b >> at) + half(c >> at)));
    result |= static_cast<uint32_t>(__half_as_ushort(value)) << at;
  }
  return result;
}

inline uint32_t halves_fma(uint32_t a, uint32_t b, uint32_t c) {
  return each_half(a, b, c, [](double x) { return x; });
}
inline uint32_t halves_fma_sat(uint32_t a, uint32_t b, uint32_t c) {
  return each_half(a, b, c, [](double x) { return std::fmin(std::fmax(x, 0.0), 1.0); });
}

}  // namespace exl3::cuda
