// Sixteen float32 lanes: the primitives that cpu/simd is written in. Everything is static: a file
// of another level never shares these functions.
#pragma once
#include <immintrin.h>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of its own header: _mm512_undefined_ps as the unused operand of unmasked intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "exl3/types.h"

#define EXL3_LEVEL avx512

namespace exl3::avx512 {

using vec = __m512;  // + - * / work on it
using vmask = __mmask16;
constexpr int kLanes = 16;

static inline vec vzero() { return _mm512_setzero_ps(); }
static inline vec vset(float f) { return _mm512_set1_ps(f); }
static inline vec vload(const float* p) { return _mm512_loadu_ps(p); }
static inline void vstore(float* p, vec v) { _mm512_storeu_ps(p, v); }
// a * b + c and c - a * b, rounded once.
static inline vec vfma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec vfnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }
// A NaN in b is kept, one in a is dropped.
static inline vec vmax(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec vmin(vec a, vec b) { return _mm512_min_ps(a, b); }
static inline vec vround(vec a) { return _mm512_roundscale_ps(a, 8); }
static inline vec vabs(vec a) { return _mm512_abs_ps(a); }

// a * 2^n, n whole.
static inline vec vscale(vec a, vec n) { return _mm512_scalef_ps(a, n); }

static inline vmask vless(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline vmask vequal(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
static inline vec vselect(vmask m, vec yes, vec no) { return _mm512_mask_blend_ps(m, no, yes); }
static inline bool vany(vmask m) { return m != 0; }
static inline int vfirst(vmask m) { return __builtin_ctz(m); }  // m not empty

// Lanes [0, n); n is clipped to 0..kLanes.
static inline vmask vhead(int64_t n) {
  if (n <= 0) return 0;
  return n >= kLanes ? static_cast<vmask>(0xFFFF) : static_cast<vmask>((1u << n) - 1);
}
static inline vmask vnot(vmask m) { return static_cast<vmask>(~m); }
static inline vmask vand(vmask a, vmask b) { return static_cast<vmask>(a & b); }

static inline vec vload_part(const float* p, int n) { return _mm512_maskz_loadu_ps(vhead(n), p); }
static inline void vstore_part(float* p, vec v, int n) { _mm512_mask_storeu_ps(p, vhead(n), v); }

static inline vec vload_half(const half_bits* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline vec vload_half_part(const half_bits* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(vhead(n), p));
}
static inline void vstore_half(half_bits* p, vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, 0));
}
static inline void vstore_half_part(half_bits* p, vec v, int n) {
  _mm256_mask_storeu_epi16(p, vhead(n), _mm512_cvtps_ph(v, 0));
}
static inline vec vload_bf16(const bf16_bits* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

// Sums across lanes take one order: within four neighbours (a[0] + a[2]) + (a[1] + a[3]), then
// neighbouring fours, then those.
constexpr int kSumOrder[4] = {0, 2, 1, 3};
static inline float vsum(vec v) {
  v = v + _mm512_permute_ps(v, 0x4E);
  v = v + _mm512_permute_ps(v, 0xB1);
  v = v + _mm512_shuffle_f32x4(v, v, 0xB1);
  v = v + _mm512_shuffle_f32x4(v, v, 0x4E);
  return _mm512_cvtss_f32(v);
}
static inline float vtop(vec v) { return _mm512_reduce_max_ps(v); }

// Lane i of the result is the sum of the lanes of a[i].
static inline __attribute__((always_inline)) vec vsums(const vec* a) {
  vec u[4];
  for (int i = 0; i < 4; ++i) {
    const vec* b = a + 4 * i;
    const vec s = _mm512_unpacklo_ps(b[0], b[1]) + _mm512_unpackhi_ps(b[0], b[1]);
    const vec t = _mm512_unpacklo_ps(b[2], b[3]) + _mm512_unpackhi_ps(b[2], b[3]);
    u[i] = _mm512_shuffle_ps(s, t, 0x44) + _mm512_shuffle_ps(s, t, 0xEE);
  }
  const vec s = _mm512_shuffle_f32x4(u[0], u[1], 0x88) + _mm512_shuffle_f32x4(u[0], u[1], 0xDD);
  const vec t = _mm512_shuffle_f32x4(u[2], u[3], 0x88) + _mm512_shuffle_f32x4(u[2], u[3], 0xDD);
  return _mm512_shuffle_f32x4(s, t, 0x88) + _mm512_shuffle_f32x4(s, t, 0xDD);
}

// a[i] lane j <-> a[j] lane i.
static inline void vtranspose(vec* a) {
  vec b[kLanes];
  for (int i = 0; i < 4; ++i) {
    const vec* f = a + 4 * i;
    const vec p = _mm512_unpacklo_ps(f[0], f[1]), q = _mm512_unpackhi_ps(f[0], f[1]);
    const vec r = _mm512_unpacklo_ps(f[2], f[3]), s = _mm512_unpackhi_ps(f[2], f[3]);
    b[4 * i] = _mm512_shuffle_ps(p, r, 0x44);
    b[4 * i + 1] = _mm512_shuffle_ps(p, r, 0xEE);
    b[4 * i + 2] = _mm512_shuffle_ps(q, s, 0x44);
    b[4 * i + 3] = _mm512_shuffle_ps(q, s, 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    const vec p = _mm512_shuffle_f32x4(b[i], b[4 + i], 0x88);
    const vec q = _mm512_shuffle_f32x4(b[i], b[4 + i], 0xDD);
    const vec r = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0x88);
    const vec s = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0xDD);
    a[i] = _mm512_shuffle_f32x4(p, r, 0x88);
    a[8 + i] = _mm512_shuffle_f32x4(p, r, 0xDD);
    a[4 + i] = _mm512_shuffle_f32x4(q, s, 0x88);
    a[12 + i] = _mm512_shuffle_f32x4(q, s, 0xDD);
  }
}

// (a0 b0 a1 b1 ...) in two registers <-> (a0 a1 ...), (b0 b1 ...).
static inline void vunzip(vec& x, vec& y) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const vec a = _mm512_permutex2var_ps(x, even, y);
  y = _mm512_permutex2var_ps(x, _mm512_add_epi32(even, _mm512_set1_epi32(1)), y);
  x = a;
}
static inline void vzip(vec& x, vec& y) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const vec a = _mm512_permutex2var_ps(x, low, y);
  y = _mm512_permutex2var_ps(x, _mm512_add_epi32(low, _mm512_set1_epi32(8)), y);
  x = a;
}

}  // namespace exl3::avx512
