// Eight float32 lanes: the primitives that cpu/simd is written in. Everything is static: a file of
// another level never shares these functions.
#pragma once
#include <immintrin.h>

#include "exl3/types.h"

#define EXL3_LEVEL avx2

namespace exl3::avx2 {

using vec = __m256;  // + - * / work on it
using vmask = __m256;
constexpr int kLanes = 8;

static inline vec vzero() { return _mm256_setzero_ps(); }
static inline vec vset(float f) { return _mm256_set1_ps(f); }
static inline vec vload(const float* p) { return _mm256_loadu_ps(p); }
static inline void vstore(float* p, vec v) { _mm256_storeu_ps(p, v); }
// a * b + c and c - a * b, rounded once.
static inline vec vfma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec vfnma(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); }
// A NaN in b is kept, one in a is dropped.
static inline vec vmax(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec vmin(vec a, vec b) { return _mm256_min_ps(a, b); }
static inline vec vround(vec a) { return _mm256_round_ps(a, 8); }
static inline vec vabs(vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }

// a * 2^n, n whole, -125 to 128.
static inline vec vscale(vec a, vec n) {
  const __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(126));
  return (a + a) * _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
}

static inline vmask vless(vec a, vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline vmask vequal(vec a, vec b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
static inline vec vselect(vmask m, vec yes, vec no) { return _mm256_blendv_ps(no, yes, m); }
static inline bool vany(vmask m) { return _mm256_movemask_ps(m) != 0; }
static inline int vfirst(vmask m) { return __builtin_ctz(_mm256_movemask_ps(m)); }  // m not empty

// Lanes [0, n); n is clipped to 0..kLanes.
static inline vmask vhead(int64_t n) {
  const int clipped = n < 0 ? 0 : n > kLanes ? kLanes : static_cast<int>(n);
  const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(clipped), lane));
}
static inline vmask vnot(vmask m) {
  return _mm256_xor_ps(m, _mm256_castsi256_ps(_mm256_set1_epi32(-1)));
}
static inline vmask vand(vmask a, vmask b) { return _mm256_and_ps(a, b); }

static inline vec vload_part(const float* p, int n) {
  return _mm256_maskload_ps(p, _mm256_castps_si256(vhead(n)));
}
static inline void vstore_part(float* p, vec v, int n) {
  _mm256_maskstore_ps(p, _mm256_castps_si256(vhead(n)), v);
}

static inline vec vload_half(const half_bits* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline vec vload_half_part(const half_bits* p, int n) {
  half_bits whole[kLanes] = {};
  for (int i = 0; i < n && i < kLanes; ++i) whole[i] = p[i];
  return vload_half(whole);
}
static inline void vstore_half(half_bits* p, vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, 0));
}
static inline void vstore_half_part(half_bits* p, vec v, int n) {
  half_bits whole[kLanes];
  vstore_half(whole, v);
  for (int i = 0; i < n && i < kLanes; ++i) p[i] = whole[i];
}
static inline vec vload_bf16(const bf16_bits* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

// Sums across lanes take one order: within four neighbours (a[0] + a[1]) + (a[2] + a[3]), then
// the two fours.
constexpr int kSumOrder[4] = {0, 1, 2, 3};
static inline float vsum(vec v) {
  v = v + _mm256_permute_ps(v, 0xB1);
  v = v + _mm256_permute_ps(v, 0x4E);
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)));
}
static inline float vtop(vec v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

// Lane i of the result is the sum of the lanes of a[i].
static inline __attribute__((always_inline)) vec vsums(const vec* a) {
  vec u[2];
  for (int i = 0; i < 2; ++i) {
    const vec* b = a + 4 * i;
    u[i] = _mm256_hadd_ps(_mm256_hadd_ps(b[0], b[1]), _mm256_hadd_ps(b[2], b[3]));
  }
  return _mm256_permute2f128_ps(u[0], u[1], 0x20) + _mm256_permute2f128_ps(u[0], u[1], 0x31);
}

// a[i] lane j <-> a[j] lane i.
static inline void vtranspose(vec* a) {
  vec b[kLanes];
  for (int i = 0; i < 2; ++i) {
    const vec* f = a + 4 * i;
    const vec p = _mm256_unpacklo_ps(f[0], f[1]), q = _mm256_unpackhi_ps(f[0], f[1]);
    const vec r = _mm256_unpacklo_ps(f[2], f[3]), s = _mm256_unpackhi_ps(f[2], f[3]);
    b[4 * i] = _mm256_shuffle_ps(p, r, 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(p, r, 0xEE);
    b[4 * i + 2] = _mm256_shuffle_ps(q, s, 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(q, s, 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_permute2f128_ps(b[i], b[4 + i], 0x20);
    a[4 + i] = _mm256_permute2f128_ps(b[i], b[4 + i], 0x31);
  }
}

// (a0 b0 a1 b1 ...) in two registers <-> (a0 a1 ...), (b0 b1 ...).
static inline void vunzip(vec& x, vec& y) {
  const vec p = _mm256_permute2f128_ps(x, y, 0x20), q = _mm256_permute2f128_ps(x, y, 0x31);
  x = _mm256_shuffle_ps(p, q, 0x88);
  y = _mm256_shuffle_ps(p, q, 0xDD);
}
static inline void vzip(vec& x, vec& y) {
  const vec p = _mm256_unpacklo_ps(x, y), q = _mm256_unpackhi_ps(x, y);
  x = _mm256_permute2f128_ps(p, q, 0x20);
  y = _mm256_permute2f128_ps(p, q, 0x31);
}

}  // namespace exl3::avx2
