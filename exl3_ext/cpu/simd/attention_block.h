// Attention of a block of rows (prefill). Lanes are rows, so that neither K nor V is transposed and
// the softmax needs no sum across lanes:
//   S[key][row] = K[key][:] . Q^T[:][row]       K converted, one scalar broadcast per multiply-add
//   P = exp(S - top), online over blocks of keys
//   O^T[dim][row] += V[key][dim] P[key][row]
// Both products are the same register tile. Memory: the scratch of attention.h, about 80 KiB for
// heads of 64. Bound by the multiply-adds.
#pragma once

namespace exl3::EXL3_LEVEL {

constexpr int kTileVectors = kLanes == 16 ? 4 : 2;
constexpr int kScoreTile = kLanes == 16 ? 8 : 4;  // keys times vectors of rows
constexpr int kRowStep = kAttentionRows;          // floats between rows of Q^T, S and O^T

struct BlockRows {
  float* q;      // [head_dim, kRowStep] Q^T, scaled
  float* k;      // [kAttentionKeys, head_dim]
  float* v;      // [kAttentionKeys, v_head_dim]
  float* score;  // [kAttentionKeys, kRowStep]
  float* sum_v;  // [v_head_dim, kRowStep]
  float top[kAttentionRows], sum[kAttentionRows];
  int64_t begin[kAttentionRows], end[kAttentionRows];  // the keys that each row sees
};

// One operand of a product: element (i, k) is at[i * row + k * inner].
struct Operand {
  const float* at;
  int64_t row, inner;
};

// C[M][N vectors] = A B, or C * keep + A B.
template <int M, int N>
static inline void tile(Operand a, const float* b, int inner, float* c, const vec* keep) {
  vec acc[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      acc[m][n] = keep ? vload(c + m * kRowStep + n * kLanes) * keep[n] : vzero();
    }
  }
  for (int k = 0; k < inner; ++k) {
    vec x[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) x[n] = vload(b + k * kRowStep + n * kLanes);
    const float* column = a.at + k * a.inner;
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vec y = vset(column[m * a.row]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n] = vfma(y, x[n], acc[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) vstore(c + m * kRowStep + n * kLanes, acc[m][n]);
  }
}

// The same for any number of rows of A.
template <int N>
static void product(Operand a, int rows, const float* b, int inner, float* c, const vec* keep) {
  constexpr int kMost = N >= kTileVectors ? 6 : 8;
  int m = 0;
  const auto next = [&](int done) {
    m += done;
    a.at += done * a.row;
    c += done * kRowStep;
  };
  for (; rows - m >= kMost; next(kMost)) tile<kMost, N>(a, b, inner, c, keep);
  for (; rows - m >= 4; next(4)) tile<4, N>(a, b, inner, c, keep);
  for (; rows - m >= 2; next(2)) tile<2, N>(a, b, inner, c, keep);
  for (; rows - m >= 1; next(1)) tile<1, N>(a, b, inner, c, keep);
}

// Scores of M keys and N vectors of rows, or parts of them.
template <int M, int N>
struct Scores {
  vec v[M][N];
};

#define EXL3_INLINE static inline __attribute__((always_inline))

template <int M, int N>
EXL3_INLINE Scores<M, N> add(Scores<M, N> a, const Scores<M, N>& b) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) a.v[m][n] = a.v[m][n] + b.v[m][n];
  }
  return a;
}

// M keys at k times N vectors of rows at q.
template <int M, int N, class F>
EXL3_INLINE void each_product(const float* k, int dim, const float* q, const F& f) {
  vec x[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    x[n] = vload(q + n * kLanes);
    __asm__("" : "+v"(x[n]));  // one load, not one for each key
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const vec y = vset(k[m * dim]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) f(m, n, y, x[n]);
  }
}

// What lane `c` of few_scores sums.
template <int M, int N>
EXL3_INLINE Scores<M, N> lane_products(const float* k, const float* q, int dim, int c) {
  Scores<M, N> sum{};
  if (c >= dim) return sum;
  q += c * kRowStep;
  each_product<M, N>(k + c, dim, q, [&](int m, int n, vec y, vec x) { sum.v[m][n] = y * x; });
#pragma GCC unroll 8
  for (int i = kLanes; i < dim - c; i += kLanes) {
    each_product<M, N>(k + c + i, dim, q + i * kRowStep,
                       [&](int m, int n, vec y, vec x) { sum.v[m][n] = vfma(y, x, sum.v[m][n]); });
  }
  return sum;
}

// Four lanes from `c` on, in the order of vsums.
template <int M, int N>
EXL3_INLINE Scores<M, N> group_products(const float* k, const float* q, int dim, int c) {
  const auto lane = [&](int i) { return lane_products<M, N>(k, q, dim, c + kSumOrder[i]); };
  const Scores<M, N> half = add(lane(0), lane(1));
  return add(half, add(lane(2), lane(3)));
}

// The same to the bit as few_scores. kDim: known to the compiler, or 0.
template <int M, int N, int kDim>
static void score_tile(const float* k, const float* q, int any_dim, float* s) {
  const int dim = kDim ? kDim : any_dim;
  const auto group = [&](int c) { return group_products<M, N>(k, q, dim, c); };
  Scores<M, N> sum = add(group(0), group(4));
  if constexpr (kLanes == 16) sum = add(sum, add(group(8), group(12)));
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) vstore(s + m * kRowStep + n * kLanes, sum.v[m][n]);
  }
}

template <int N, int kDim>
static void block_scores(const BlockRows& f, int lane, int dim, int n) {
  constexpr int kMost = N == 1 ? kScoreTile : N == 2 ? kScoreTile / 2 : kScoreTile / 4;
  if constexpr (N == 4) {  // half of Q stays in the first-level cache
    block_scores<2, kDim>(f, lane, dim, n);
    return block_scores<2, kDim>(f, lane + 2 * kLanes, dim, n);
  }
  const float *k = f.k, *q = f.q + lane;
  float* s = f.score + lane;
  int t = 0;
  for (; n - t >= kMost; t += kMost) {
    score_tile<kMost, N, kDim>(k + t * dim, q, dim, s + t * kRowStep);
  }
  for (; t < n; ++t) score_tile<1, N, kDim>(k + t * dim, q, dim, s + t * kRowStep);
}

// -infinity where a row of lanes [lane, lane + kLanes) does not see a key of the block.
static inline void mask_lanes(const BlockRows& f, int lane, int64_t key, int n) {
  float begin[kLanes], end[kLanes];
  bool whole = true;
  for (int i = 0; i < kLanes; ++i) {
    const int64_t b = f.begin[lane + i] - key, e = f.end[lane + i] - key;
    whole &= b <= 0 && e >= n;
    begin[i] = static_cast<float>(b < 0 ? 0 : b > n ? n : b);
    end[i] = static_cast<float>(e < 0 ? 0 : e > n ? n : e);
  }
  if (whole) return;
  const vec from = vload(begin), to = vload(end), low = vset(-__builtin_inff());
  for (int t = 0; t < n; ++t) {
    float* s = f.score + t * kRowStep + lane;
    const vec at = vset(static_cast<float>(t));
    vstore(s, vselect(vand(vless(at, to), vnot(vless(at, from))), vload(s), low));
  }
}

static inline void cap_scores(float* s, int n, float softcap) {
  for (int t = 0; t < n; ++t, s += kRowStep) {
    vstore(s, vset(softcap) * vtanh(vload(s) * vset(1.0f / softcap)));
  }
}

// Sum of e over n keys from `key` on of a vector of rows: as lanes of keys, then across them like
// vsum.
static inline vec sum_keys(const float* e, int64_t key, int n) {
  const int offset = static_cast<int>(key % kLanes);
  const auto lane = [&](int at) {
    vec sum = vzero();
    for (int t = (at - offset) & (kLanes - 1); t < n; t += kLanes)
      sum = sum + vload(e + t * kRowStep);
    return sum;
  };
  const auto group = [&](int at) {
    const vec a = lane(at + kSumOrder[0]) + lane(at + kSumOrder[1]);
    return a + (lane(at + kSumOrder[2]) + lane(at + kSumOrder[3]));
  };
  const vec sum = group(0) + group(4);
  if constexpr (kLanes == 16) return sum + (group(8) + group(12));
  return sum;
}

// Scores of one vector of rows become exp(score - greatest so far); returns the factor that what
// was summed before must take.
static inline vec softmax_lanes(BlockRows& f, int lane, int64_t key, int n) {
  float* s = f.score + lane;
  const vec low = vset(-__builtin_inff()), old = vload(f.top + lane);
  vec best[2] = {old, low};
  int t = 0;
  for (; t + 2 <= n; t += 2) {
    best[0] = vmax(vload(s + t * kRowStep), best[0]);
    best[1] = vmax(vload(s + (t + 1) * kRowStep), best[1]);
  }
  if (t < n) best[0] = vmax(vload(s + t * kRowStep), best[0]);
  const vec top = vmax(best[0], best[1]);
  const vec base = vselect(vequal(top, low), vzero(), top);
#pragma GCC unroll 4
  for (t = 0; t < n; ++t) vstore(s + t * kRowStep, vexp(vload(s + t * kRowStep) - base));
  const vec keep = vexp(old - base);
  vstore(f.top + lane, top);
  vstore(f.sum + lane, vload(f.sum + lane) * keep + sum_keys(s, key, n));
  return keep;
}

// N vectors of rows from `lane` on, over one block of n keys.
template <int N>
static void block_step(const AttentionParams& p, BlockRows& f, int lane, int64_t key, int n,
                       bool first) {
  float* s = f.score + lane;
  if (p.head_dim == 64)
    block_scores<N, 64>(f, lane, 64, n);
  else if (p.head_dim == 128)
    block_scores<N, 128>(f, lane, 128, n);
  else
    block_scores<N, 0>(f, lane, p.head_dim, n);
  vec keep[N];
  for (int i = 0; i < N; ++i) {
    if (p.softcap > 0) cap_scores(s + i * kLanes, n, p.softcap);
    mask_lanes(f, lane + i * kLanes, key, n);
    keep[i] = softmax_lanes(f, lane + i * kLanes, key, n);
  }
  product<N>({f.v, 1, p.v_head_dim}, p.v_head_dim, s, n, f.sum_v + lane, first ? nullptr : keep);
}

// n rows of one head, the first of them `row`, the others `step` apart.
static inline void convert_rows(const half_bits* cache, const QuantRows& quant, int64_t row,
                                int64_t step, int dim, int n, float* to) {
  if (quant.bits) return dequantise_rows(quant, row, step, dim, n, to);
  const half_bits* from = cache + row * dim;
  step *= dim;
  for (int t = 0; t < n; ++t, from += step, to += dim) {
    each_vector(dim, [&](int64_t i, int lanes) {
      if (lanes == kLanes)
        vstore(to + i, vload_half(from + i));
      else
        vstore_part(to + i, vload_half_part(from + i, lanes), lanes);
    });
  }
}

// Q of a vector of rows, transposed; rows past the end are 0.
static inline void load_queries(const AttentionParams& p, const AttentionTask& t,
                                const BlockRows& f, int lane) {
  const int64_t rows = t.row_end - t.row_begin;
  const vec scale = vset(p.scale);
  for (int c = 0; c < p.head_dim; c += kLanes) {
    const int n = p.head_dim - c < kLanes ? p.head_dim - c : kLanes;
    vec block[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int64_t row = t.row_begin + lane + i;
      block[i] = lane + i < rows ? load_n(query_row(p, t.sequence, t.kv_head, row) + c, n) * scale
                                 : vzero();
    }
    vtranspose(block);
    for (int i = 0; i < n; ++i) vstore(f.q + (c + i) * kRowStep + lane, block[i]);
  }
  if (p.k_quant.bits) rotate_lanes(f.q + lane, kRowStep, p.head_dim);
}

// The results of a vector of rows.
static inline void store_lanes(const AttentionParams& p, const BlockRows& f, int lane, int count,
                               float* to) {
  const int64_t stride = partial_stride(p);
  for (int i = 0; i < count; ++i) {
    to[i * stride + p.v_head_dim] = f.top[lane + i];
    to[i * stride + p.v_head_dim + 1] = f.sum[lane + i];
  }
  for (int c = 0; c < p.v_head_dim; c += kLanes) {
    const int n = p.v_head_dim - c < kLanes ? p.v_head_dim - c : kLanes;
    vec block[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      block[i] = i < n ? vload(f.sum_v + (c + i) * kRowStep + lane) : vzero();
    }
    vtranspose(block);
    for (int i = 0; i < count; ++i) store_n(to + i * stride + c, block[i], n);
  }
}

static int row_vectors(const AttentionTask& t) {
  return static_cast<int>((t.row_end - t.row_begin + kLanes - 1) / kLanes);
}

static void block_queries(const AttentionParams& p, const AttentionTask& t, BlockRows& f,
                          float* scratch) {
  f.q = scratch;
  f.k = f.q + static_cast<int64_t>(p.head_dim) * kRowStep;
  f.v = f.k + static_cast<int64_t>(p.head_dim) * kAttentionKeys;
  f.sum_v = f.v + static_cast<int64_t>(p.v_head_dim) * kAttentionKeys;
  f.score = f.sum_v + static_cast<int64_t>(p.v_head_dim) * kRowStep;
  const int64_t rows = t.row_end - t.row_begin;
  for (int r = 0; r < kAttentionRows; ++r) {
    KeyRange seen{0, 0};
    if (r < rows) seen = visible_keys(p, t.sequence, (t.row_begin + r) / group_size(p));
    f.begin[r] = seen.begin;
    f.end[r] = seen.end;
  }
  for (int i = 0; i < row_vectors(t); ++i) load_queries(p, t, f, i * kLanes);
}

// The result of keys [begin, end) of one chunk.
static void block_chunk(const AttentionParams& p, const AttentionTask& t, BlockRows& f,
                        int64_t begin, int64_t end, float* to) {
  const int vectors = row_vectors(t);
  for (int r = 0; r < kAttentionRows; ++r) {
    f.top[r] = -__builtin_inff();
    f.sum[r] = 0;
  }
  for (int64_t key = begin; key < end;) {
    const int64_t next = block_end(key, end);
    const int n = static_cast<int>(next - key);
    const int64_t row = cache_slot(p, t.sequence, key) * p.kv_heads + t.kv_head;
    convert_rows(p.k_cache, p.k_quant, row, p.kv_heads, p.head_dim, n, f.k);
    convert_rows(p.v_cache, p.v_quant, row, p.kv_heads, p.v_head_dim, n, f.v);
    const bool first = key == begin;
    for (int i = 0; i < vectors; i += kTileVectors) {
      switch (vectors - i) {
        case 1:
          block_step<1>(p, f, i * kLanes, key, n, first);
          break;
        case 2:
          block_step<2>(p, f, i * kLanes, key, n, first);
          break;
        case 3:
          block_step < kTileVectors<3 ? kTileVectors : 3>(p, f, i * kLanes, key, n, first);
          break;
        default:
          block_step<kTileVectors>(p, f, i * kLanes, key, n, first);
      }
    }
    key = next;
  }
  for (int i = 0; i < vectors; ++i) {
    const int64_t left = t.row_end - t.row_begin - i * kLanes;
    store_lanes(p, f, i * kLanes, static_cast<int>(left < kLanes ? left : kLanes),
                to + i * kLanes * partial_stride(p));
  }
}

}  // namespace exl3::EXL3_LEVEL
