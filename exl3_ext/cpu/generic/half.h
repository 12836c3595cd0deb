// float16 and bfloat16 conversion without instructions for it. Exact; rounding to nearest even.
#pragma once
#include <cstdint>
#include <cstring>

#include "exl3/types.h"

namespace exl3::generic {

static inline uint32_t bits_of(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
static inline float float_of(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

static inline float half_to_float(half_bits h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t rest = h & 0x7FFF;
  if (rest >= 0x7C00) return float_of(sign | 0x7F800000 | ((rest & 0x3FF) << 13));
  // 2^112 moves the exponent from bias 15 to bias 127 and makes subnormals normal.
  return float_of(bits_of(float_of(rest << 13) * 0x1p112f) | sign);
}

static inline half_bits float_to_half(float f) {
  const uint32_t u = bits_of(f);
  const uint32_t sign = (u >> 16) & 0x8000;
  uint32_t a = u & 0x7FFFFFFF;
  if (a > 0x7F800000) return static_cast<half_bits>(sign | 0x7E00 | ((a >> 13) & 0x1FF));
  if (a >= 0x47800000) return static_cast<half_bits>(sign | 0x7C00);
  if (a < 0x38800000) {  // subnormal or zero: adding 0.5 leaves the rounded bits at the bottom
    return static_cast<half_bits>(sign | (bits_of(float_of(a) + 0.5f) - bits_of(0.5f)));
  }
  a += 0xFFF + ((a >> 13) & 1);
  return static_cast<half_bits>(sign | ((a - 0x38000000) >> 13));
}

static inline float bf16_to_float(bf16_bits b) { return float_of(static_cast<uint32_t>(b) << 16); }

static inline bf16_bits float_to_bf16(float f) {
  const uint32_t u = bits_of(f);
  if ((u & 0x7FFFFFFF) > 0x7F800000) return static_cast<bf16_bits>((u >> 16) | 0x40);
  return static_cast<bf16_bits>((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
}

static inline float load_float(const void* base, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat16:
      return half_to_float(static_cast<const half_bits*>(base)[i]);
    case DType::kBFloat16:
      return bf16_to_float(static_cast<const bf16_bits*>(base)[i]);
    default:
      return static_cast<const float*>(base)[i];
  }
}

static inline void store_float(void* base, DType dtype, int64_t i, float v) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<half_bits*>(base)[i] = float_to_half(v);
      break;
    case DType::kBFloat16:
      static_cast<bf16_bits*>(base)[i] = float_to_bf16(v);
      break;
    default:
      static_cast<float*>(base)[i] = v;
  }
}

}  // namespace exl3::generic
