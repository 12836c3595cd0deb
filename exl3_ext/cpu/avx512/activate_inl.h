// Activation functions of 16 values.
#pragma once
#include <immintrin.h>
#include <math.h>

#include "cpu/avx512/states.h"

namespace exl3::avx512 {

// e^x to 2 ulp: 2^n times a polynomial on |r| <= ln(2) / 2. NaN stays NaN.
EXL3_STATIC __m512 exp_ps(__m512 x) {
  const __m512 clamped =
      _mm512_max_ps(_mm512_set1_ps(-150.0f), _mm512_min_ps(_mm512_set1_ps(150.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), clamped);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
  __m512 e = _mm512_set1_ps(1.0f / 720);
  e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(1.0f / 120));
  e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(1.0f / 24));
  e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(1.0f / 6));
  e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(0.5f));
  e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(1.0f));
  e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(e, n);
}

// x / (1 + e^-z): silu with z = x, tanh-gelu with z = 2 * the argument of tanh.
EXL3_STATIC __m512 times_sigmoid(__m512 x, __m512 z) {
  const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), z));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

EXL3_STATIC __m512 gelu_ps(__m512 x) {
  alignas(64) float v[16];
  _mm512_store_ps(v, x);
  for (int i = 0; i < 16; ++i) v[i] = 0.5f * v[i] * (1.0f + erff(v[i] * 0.70710678f));
  return _mm512_load_ps(v);
}

EXL3_STATIC __m512 gelu_tanh_ps(__m512 x) {
  const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  const __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
  return times_sigmoid(x, _mm512_mul_ps(inner, _mm512_set1_ps(2 * 0.79788456f)));
}

// `kind` as in LinearParams.
EXL3_STATIC __m512 activate_ps(int kind, __m512 x) {
  switch (kind) {
    case 0:
      return times_sigmoid(x, x);
    case 1:
      return gelu_ps(x);
    case 2:
      return gelu_tanh_ps(x);
    default:
      return _mm512_max_ps(_mm512_setzero_ps(), x);  // NaN, as second operand, is kept
  }
}

}  // namespace exl3::avx512
