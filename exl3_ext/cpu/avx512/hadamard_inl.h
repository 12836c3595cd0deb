// The 128-point Hadamard butterfly in eight registers, and loads and stores of 16 values.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "exl3/types.h"

namespace exl3::avx512 {

constexpr float kHadamardNorm = 0.08838834764831845f;  // 1 / sqrt(128)

// lane i: a[i] + a[i ^ h] where bit h of i is clear, a[i ^ h] - a[i] where it is set. `swapped`
// holds a[i ^ h], `sign` is 1 or -1. The product is exact, so this rounds as add and subtract do.
static inline __m512 butterfly_lanes(__m512 a, __m512 swapped, __m512 sign) {
  return _mm512_fmadd_ps(a, sign, swapped);
}

static inline __m512 lane_signs(__mmask16 negative) {
  return _mm512_mask_blend_ps(negative, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
}

// v[r] lane i is element 16r + i. Not normalised: multiply by kHadamardNorm. The order of the
// additions is that of the generic level, so all levels agree to the bit.
static inline __attribute__((always_inline)) void hadamard128(__m512* v) {
  const __m512 s1 = lane_signs(0xAAAA), s2 = lane_signs(0xCCCC);
  const __m512 s4 = lane_signs(0xF0F0), s8 = lane_signs(0xFF00);
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) {
    v[r] = butterfly_lanes(v[r], _mm512_permute_ps(v[r], 0xB1), s1);
    v[r] = butterfly_lanes(v[r], _mm512_permute_ps(v[r], 0x4E), s2);
    v[r] = butterfly_lanes(v[r], _mm512_shuffle_f32x4(v[r], v[r], 0xB1), s4);
    v[r] = butterfly_lanes(v[r], _mm512_shuffle_f32x4(v[r], v[r], 0x4E), s8);
  }
#pragma GCC unroll 3
  for (int h = 1; h < 8; h *= 2) {
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) {
      if (r & h) continue;
      const __m512 a = v[r], b = v[r + h];
      v[r] = _mm512_add_ps(a, b);
      v[r + h] = _mm512_sub_ps(a, b);
    }
  }
}

static inline __m512 load16_half(const half_bits* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline void store16_half(half_bits* p, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline __m512 load16_bf16(const bf16_bits* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

// Rounds to nearest even; a NaN stays a (quiet) NaN.
static inline __m256i to_bf16(__m512 v) {
  const __m512i u = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}
static inline void store16_bf16(bf16_bits* p, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(v));
}

static inline __m512 load16(const void* base, DType dtype, int64_t i) {
  if (dtype == DType::kFloat16) return load16_half(static_cast<const half_bits*>(base) + i);
  if (dtype == DType::kBFloat16) return load16_bf16(static_cast<const bf16_bits*>(base) + i);
  return _mm512_loadu_ps(static_cast<const float*>(base) + i);
}
static inline void store16(void* base, DType dtype, int64_t i, __m512 v) {
  if (dtype == DType::kFloat16)
    store16_half(static_cast<half_bits*>(base) + i, v);
  else if (dtype == DType::kBFloat16)
    store16_bf16(static_cast<bf16_bits*>(base) + i, v);
  else
    _mm512_storeu_ps(static_cast<float*>(base) + i, v);
}

}  // namespace exl3::avx512
