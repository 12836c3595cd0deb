// Low-rank additions over vectors. Included by low_rank.cpp of each level, after its vec.h, with
// EXL3_TILE_ROWS rows at a time: so many that their sums stay in registers. Bound by reading a and
// b for few rows, by the products for many.
#pragma once
#include "cpu/low_rank.h"
#include "cpu/simd/span.h"

namespace exl3::EXL3_LEVEL {

constexpr int kTileRows = EXL3_TILE_ROWS;
constexpr int kTileVectors = 4;

// R rows with Q ranks: one running sum each.
template <int R, int Q>
static inline void tile_products(const float* const* x, const float* a, int64_t k,
                                 float* const* out) {
  vec sum[R][Q];
  for (int r = 0; r < R; ++r) {
    for (int q = 0; q < Q; ++q) sum[r][q] = vzero();
  }
  each_vector(k, [&](int64_t i, int n) {
    vec w[Q];
    for (int q = 0; q < Q; ++q) w[q] = load_n(a + q * k + i, n);
    for (int r = 0; r < R; ++r) {
      const vec v = load_n(x[r] + i, n);
      for (int q = 0; q < Q; ++q) sum[r][q] = vfma(v, w[q], sum[r][q]);
    }
  });
  for (int r = 0; r < R; ++r) {
    for (int q = 0; q < Q; ++q) out[r][q] = vsum(sum[r][q]);
  }
}

template <int R>
static inline void inner_rows(const LowRankParams& p, const LowRankInner& t, const int* active) {
  const LowRankPart& part = p.part[t.part];
  const float* x[R];
  float* out[R];
  for (int r = 0; r < R; ++r) {
    const int64_t row = t.row + active[r];
    x[r] = p.x + row * p.x_stride;
    out[r] = p.inner + row * p.ranks + part.first_rank + t.rank;
  }
  const float* a = part.a + t.rank * p.k;
  if (t.ranks == kLowRankRanks) return tile_products<R, kLowRankRanks>(x, a, p.k, out);
  for (int q = 0; q < t.ranks; ++q) {
    tile_products<R, 1>(x, a + q * p.k, p.k, out);
    for (int r = 0; r < R; ++r) ++out[r];
  }
}

void low_rank_inner(const LowRankParams& p, const LowRankInner& t) {
  int active[kLowRankRows];
  const int n = active_rows(p, p.part[t.part], t.row, t.rows, active);
  int i = 0;
  for (; i + kTileRows <= n; i += kTileRows) inner_rows<kTileRows>(p, t, active + i);
  for (; i < n; ++i) inner_rows<1>(p, t, active + i);
}

// V vectors of R rows; with V 1, n lanes of it.
template <int R, int V>
static inline void add_columns(const LowRankPart& part, const float (*factors)[R], int64_t column,
                               float* const* y, int n) {
  vec sum[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) sum[r][v] = vzero();
  }
  const float* weight = part.b + column;
  for (int64_t rank = 0; rank < part.rank; ++rank, weight += part.n) {
    vec w[V];
    for (int v = 0; v < V; ++v) w[v] = V == 1 ? load_n(weight, n) : vload(weight + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const vec factor = vset(factors[rank][r]);
      for (int v = 0; v < V; ++v) sum[r][v] = vfma(factor, w[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      float* at = y[r] + column + v * kLanes;
      if (V == 1) {
        store_n(at, load_n(at, n) + sum[r][v], n);
      } else {
        vstore(at, vload(at) + sum[r][v]);
      }
    }
  }
}

template <int R>
static inline void add_rows(const LowRankParams& p, const LowRankBlock& b, const LowRankPart& part,
                            const int* active) {
  constexpr int64_t kRanks = 64;  // factors at a time; more ranks are one more pass over y
  const float* inner[R];
  float* y[R];
  float scale[R];
  for (int r = 0; r < R; ++r) {
    const int64_t row = b.row + active[r];
    inner[r] = p.inner + row * p.ranks + part.first_rank;
    y[r] = p.y + row * p.y_stride + part.start;
    scale[r] = p.mask[row * p.owners + part.owner];
  }
  for (int64_t first = 0; first < part.rank; first += kRanks) {
    LowRankPart some = part;
    some.rank = part.rank - first < kRanks ? part.rank - first : kRanks;
    some.b = part.b + first * part.n;
    float factors[kRanks][R];
    for (int64_t i = 0; i < some.rank; ++i) {
      for (int r = 0; r < R; ++r) factors[i][r] = scale[r] * inner[r][first + i];
    }
    int64_t c = 0;
    for (; c + kTileVectors * kLanes <= b.count; c += kTileVectors * kLanes) {
      add_columns<R, kTileVectors>(some, factors, b.column + c, y, kLanes);
    }
    each_vector(b.count - c, [&](int64_t at, int n) {
      add_columns<R, 1>(some, factors, b.column + c + at, y, n);
    });
  }
}

void low_rank_block(const LowRankParams& p, const LowRankBlock& b) {
  for (int i = b.first; i < b.last; ++i) {
    int active[kLowRankRows];
    const int n = active_rows(p, p.part[i], b.row, b.rows, active);
    int j = 0;
    for (; j + kTileRows <= n; j += kTileRows) add_rows<kTileRows>(p, b, p.part[i], active + j);
    for (; j < n; ++j) add_rows<1>(p, b, p.part[i], active + j);
  }
}

}  // namespace exl3::EXL3_LEVEL
