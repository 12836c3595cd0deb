// Products of float16 pairs held in words.
#pragma once
#include <cstdint>

namespace exl3::cuda {

// a * b + c. As intrinsics the compiler would take words that stay in registers apart, ahead of
// loops.
static __device__ __forceinline__ uint32_t halves_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
// Bounded by 0 and 1.
static __device__ __forceinline__ uint32_t halves_fma_sat(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

}  // namespace exl3::cuda
