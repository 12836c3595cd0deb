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
