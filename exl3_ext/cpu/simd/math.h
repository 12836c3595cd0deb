// exp and what is built on it, for the level whose vec.h came before. Include cpu/<level>/math.h.
#pragma once

namespace exl3::EXL3_LEVEL {

// e^x. Relative error at most 1e-7; 0 below -86.6, where the result would near the end of the
// normal range (a subnormal one costs over a hundred cycles); infinity above 88.8; NaN stays.
// exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, and exp(r) = 1 + r + r^2 p(r), p a minimax polynomial
// of degree 4.
static inline vec vexp(vec x) {
  const vec low = vset(-86.6f);
  const vmask tiny = vless(x, low);
  x = vmin(vset(89.0f), vmax(low, x));
  const vec n = vround(x * vset(1.44269504f));
  // ln 2 in two parts, the first with few bits, so that n times it is exact.
  const vec r = vfnma(n, vset(-2.12194440e-4f), vfnma(n, vset(0.693359375f), x));
  vec p = vset(1.38168596e-3f);
  p = vfma(p, r, vset(8.36864673e-3f));
  p = vfma(p, r, vset(4.16683406e-2f));
  p = vfma(p, r, vset(1.66665211e-1f));
  p = vfma(p, r, vset(4.99999940e-1f));
  return vselect(tiny, vzero(), vscale(vfma(p, r * r, r) + vset(1.0f), n));
}

static inline vec vsigmoid(vec x) { return vset(1.0f) / (vset(1.0f) + vexp(vzero() - x)); }

// x / (1 + e^-x).
static inline vec vsilu(vec x) { return x / (vset(1.0f) + vexp(vzero() - x)); }

// Absolute error about 2e-7.
static inline vec vtanh(vec x) { return vset(1.0f) - vset(2.0f) / (vexp(x + x) + vset(1.0f)); }

// erfc(x) for x >= 0, relative error about 1e-6 where it matters. Handbook of Mathematical
// Functions, 7.1.26.
static inline vec verfc(vec x) {
  const vec t = vset(1.0f) / vfma(vset(0.3275911f), x, vset(1.0f));
  vec p = vset(1.061405429f);
  p = vfma(p, t, vset(-1.453152027f));
  p = vfma(p, t, vset(1.421413741f));
  p = vfma(p, t, vset(-0.284496736f));
  p = vfma(p, t, vset(0.254829592f));
  return p * t * vexp(vzero() - x * x);
}

// x (1 + erf(x / sqrt 2)) / 2, absolute error about 1e-7 (1 + |x|).
static inline vec vgelu(vec x) {
  const vec tail = vset(0.5f) * verfc(vabs(x) * vset(0.70710678f));
  return x * vselect(vless(x, vzero()), tail, vset(1.0f) - tail);
}

// x (1 + tanh u) / 2 = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
static inline vec vgelu_tanh(vec x) {
  const vec u = vfma(vset(0.044715f) * x * x, x, x);
  return x / (vset(1.0f) + vexp(vset(-1.59576912f) * u));
}

static inline vec vrelu(vec x) { return vmax(vzero(), x); }

}  // namespace exl3::EXL3_LEVEL
