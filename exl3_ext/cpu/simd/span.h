// Walking a row vector by vector, with a short last one.
#pragma once
#include <cstdint>

namespace exl3::EXL3_LEVEL {

// f(i, n) for each vector of [0, count): n lanes from element i on.
template <class F>
static inline void each_vector(int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) f(i, kLanes);
  if (i < count) f(i, static_cast<int>(count - i));
}
static inline vec load_n(const float* p, int n) {
  return n == kLanes ? vload(p) : vload_part(p, n);
}
static inline void store_n(float* p, vec v, int n) {
  if (n == kLanes)
    vstore(p, v);
  else
    vstore_part(p, v, n);
}

// 1 / rms of a row, the same to the bit in every op.
static inline float inverse_rms(const float* x, int64_t dim, float eps) {
  vec sum[4] = {vzero(), vzero(), vzero(), vzero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= dim; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const vec v = vload(x + i + j * kLanes);
      sum[j] = vfma(v, v, sum[j]);
    }
  }
  each_vector(dim - i, [&](int64_t at, int n) {
    const vec v = load_n(x + i + at, n);
    sum[0] = vfma(v, v, sum[0]);
  });
  const float mean = vsum((sum[0] + sum[1]) + (sum[2] + sum[3])) / static_cast<float>(dim);
  return 1.0f / __builtin_sqrtf(mean + eps);
}

// y = x * scale * (weight + offset); x may be y.
static inline void scale_row(const float* x, float* y, int64_t dim, float scale,
                             const float* weight, float offset) {
  each_vector(dim, [&](int64_t i, int n) {
    vec v = load_n(x + i, n) * vset(scale);
    if (weight) v = v * (load_n(weight + i, n) + vset(offset));
    store_n(y + i, v, n);
  });
}

}  // namespace exl3::EXL3_LEVEL
