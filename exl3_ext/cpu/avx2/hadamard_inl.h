// The 128-point Hadamard butterfly in sixteen registers, and loads and stores of 8 values.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "exl3/types.h"

namespace exl3::avx2 {

constexpr float kHadamardNorm = 0.08838834764831845f;  // 1 / sqrt(128)

// lane i: a[i] + a[i ^ h] where bit h of i is clear, a[i ^ h] - a[i] where it is set. `swapped`
// holds a[i ^ h]; `minus` has the sign bit set where bit h is. Rounds as add and subtract do.
static inline __m256 butterfly_lanes(__m256 a, __m256 swapped, __m256 minus) {
  return _mm256_add_ps(swapped, _mm256_xor_ps(a, minus));
}

// v[r] lane i is element 8r + i. Not normalised: multiply by kHadamardNorm. The order of the
// additions is that of the generic level, so all levels agree to the bit.
static inline __attribute__((always_inline)) void hadamard128(__m256* v) {
  const __m256 s1 = _mm256_setr_ps(0.f, -0.f, 0.f, -0.f, 0.f, -0.f, 0.f, -0.f);
  const __m256 s2 = _mm256_setr_ps(0.f, 0.f, -0.f, -0.f, 0.f, 0.f, -0.f, -0.f);
  const __m256 s4 = _mm256_setr_ps(0.f, 0.f, 0.f, 0.f, -0.f, -0.f, -0.f, -0.f);
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) {
    v[r] = butterfly_lanes(v[r], _mm256_permute_ps(v[r], 0xB1), s1);
    v[r] = butterfly_lanes(v[r], _mm256_permute_ps(v[r], 0x4E), s2);
    v[r] = butterfly_lanes(v[r], _mm256_permute2f128_ps(v[r], v[r], 0x01), s4);
  }
#pragma GCC unroll 4
  for (int h = 1; h < 16; h *= 2) {
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      if (r & h) continue;
      const __m256 a = v[r], b = v[r + h];
      v[r] = _mm256_add_ps(a, b);
      v[r + h] = _mm256_sub_ps(a, b);
    }
  }
}

static inline __m256 load8_half(const half_bits* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline void store8_half(half_bits* p, __m256 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

static inline __m256 load8_bf16(const bf16_bits* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

// Rounds to nearest even; a NaN stays a (quiet) NaN.
static inline __m128i to_bf16(__m256 v) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  const __m256i kept = _mm256_castps_si256(
      _mm256_blendv_ps(_mm256_castsi256_ps(r), _mm256_castsi256_ps(quiet), nan));
  const __m256i top = _mm256_srli_epi32(kept, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
}
static inline void store8_bf16(bf16_bits* p, __m256 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(v));
}

static inline __m256 load8(const void* base, DType dtype, int64_t i) {
  if (dtype == DType::kFloat16) return load8_half(static_cast<const half_bits*>(base) + i);
  if (dtype == DType::kBFloat16) return load8_bf16(static_cast<const bf16_bits*>(base) + i);
  return _mm256_loadu_ps(static_cast<const float*>(base) + i);
}
static inline void store8(void* base, DType dtype, int64_t i, __m256 v) {
  if (dtype == DType::kFloat16)
    store8_half(static_cast<half_bits*>(base) + i, v);
  else if (dtype == DType::kBFloat16)
    store8_bf16(static_cast<bf16_bits*>(base) + i, v);
  else
    _mm256_storeu_ps(static_cast<float*>(base) + i, v);
}

}  // namespace exl3::avx2
