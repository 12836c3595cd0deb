#pragma once
#include "cuda_runtime.h"

using __half = _Float16;

inline __half __float2half_rn(float x) { return static_cast<__half>(x); }
inline unsigned short __half_as_ushort(__half h) {
  unsigned short bits;
  std::memcpy(&bits, &h, sizeof bits);
  return bits;
}
