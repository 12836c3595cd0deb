// Attention of a few rows (decode): every K and V row is loaded and converted once for up to four
// rows of a group. A block of keys takes three steps: scores (dot products along the head, kLanes
// of them summed across lanes at once), one online softmax step along the keys, and the sum of V.
// Bound by the conversion loads for one row, by the multiply-adds for four.
#pragma once

namespace exl3::EXL3_LEVEL {

constexpr int kFewRows = 8;
constexpr int kScoreStep = kAttentionKeys + 16;  // floats between rows of scores; slack for stores

static inline vec vload_row(const half_bits* p) { return vload_half(p); }
static inline vec vload_row(const float* p) { return vload(p); }
static inline vec vload_row_part(const half_bits* p, int n) { return vload_half_part(p, n); }
static inline vec vload_row_part(const float* p, int n) { return vload_part(p, n); }

struct FewRows {
  float* q;        // [kFewRows, q_step] scaled, zero beyond head_dim
  float* sum_v;    // [kFewRows, v_step]
  float* score;    // [kFewRows, kScoreStep]
  float* decoded;  // [kAttentionKeys, head_dim or v_head_dim] of a quantised cache
  int64_t q_step, v_step;
  int offset;  // of the block's first key in score: its position modulo kLanes
  float top[kFewRows], sum[kFewRows], keep[kFewRows];
};

static inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Scores of R rows against n keys; T: half_bits or float.
template <int R, class T>
static void few_scores(const FewRows& f, int first, const T* k, int64_t k_step, int dim, int n) {
  constexpr int kKeys = kLanes / R;
  const float* q = f.q + first * f.q_step;
  for (int t = 0; t < n; t += kKeys) {
    const T* row[kKeys];
    for (int j = 0; j < kKeys; ++j) row[j] = k + (t + j < n ? t + j : n - 1) * k_step;
    vec acc[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) acc[i] = vzero();
    int c = 0;
    for (; c + kLanes <= dim; c += kLanes) {
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) {
        const vec x = vload_row(row[j] + c);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          acc[r * kKeys + j] = vfma(x, vload(q + r * f.q_step + c), acc[r * kKeys + j]);
        }
      }
    }
    if (c < dim) {
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) {
        const vec x = vload_row_part(row[j] + c, dim - c);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          acc[r * kKeys + j] = vfma(x, vload(q + r * f.q_step + c), acc[r * kKeys + j]);
        }
      }
    }
    float out[kLanes];
    vstore(out, vsums(acc));
    for (int r = 0; r < R; ++r) {
      float* to = f.score + (first + r) * kScoreStep + f.offset + t;
      for (int j = 0; j < kKeys; ++j) to[j] = out[r * kKeys + j];
    }
  }
}

// n scores of one row become e = exp(score - greatest so far), 0 outside [begin, end).
static inline void few_softmax(FewRows& f, int r, int64_t begin, int64_t end, int n,
                               float softcap) {
  float* s = f.score + r * kScoreStep;
  const vec low = vset(-__builtin_inff());
  vec best = low;
  for (int i = 0; i < n; i += kLanes) {
    const vmask seen = vand(vhead(end - i), vnot(vhead(begin - i)));
    vec x = vload(s + i);
    if (softcap > 0) x = vset(softcap) * vtanh(x * vset(1.0f / softcap));
    x = vselect(seen, x, low);
    vstore(s + i, x);
    best = vmax(x, best);
  }
  const float old = f.top[r], found = vtop(best);
  const float top = found > old ? found : old;
  const vec base = vset(top == -__builtin_inff() ? 0.0f : top);
  vec sum = vzero();
  for (int i = 0; i < n; i += kLanes) {
    const vec e = vexp(vload(s + i) - base);
    vstore(s + i, e);
    sum = sum + e;
  }
  float keep[kLanes];
  vstore(keep, vexp(vset(old) - base));
  f.keep[r] = keep[0];
  f.top[r] = top;
  f.sum[r] = f.sum[r] * keep[0] + vsum(sum);
}

// sum_v = sum_v * keep + e * v for R rows and N vectors of columns from `column` on; the last
// vector has `part` lanes.
template <int R, int N, class T>
static void few_values(const FewRows& f, int first, const T* v, int64_t v_step, int column,
                       int part, int n) {
  vec acc[R][N];
  float* out = f.sum_v + first * f.v_step + column;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      acc[r][i] = vload(out + r * f.v_step + i * kLanes) * vset(f.keep[first + r]);
    }
  }
  const float* e = f.score + first * kScoreStep + f.offset;
  for (int t = 0; t < n; ++t) {
    const T* row = v + t * v_step + column;
    vec x[N];
#pragma GCC unroll 8
    for (int i = 0; i + 1 < N; ++i) x[i] = vload_row(row + i * kLanes);
    const T* last = row + (N - 1) * kLanes;
    x[N - 1] = part == kLanes ? vload_row(last) : vload_row_part(last, part);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vec weight = vset(e[r * kScoreStep + t]);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) acc[r][i] = vfma(weight, x[i], acc[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) vstore(out + r * f.v_step + i * kLanes, acc[r][i]);
  }
}

template <int R, class T>
static void few_all_values(const FewRows& f, int first, const T* v, int64_t v_step, int dim,
                           int n) {
  constexpr int kVectors = R == 1 ? 8 : 4;  // accumulators enough to hide the latency
  int column = 0;
  for (; dim - column >= kVectors * kLanes; column += kVectors * kLanes) {
    few_values<R, kVectors>(f, first, v, v_step, column, kLanes, n);
  }
  for (; dim - column >= 2 * kLanes; column += 2 * kLanes) {
    few_values<R, 2>(f, first, v, v_step, column, kLanes, n);
  }
  for (; column < dim; column += kLanes) {
    const int part = dim - column < kLanes ? dim - column : kLanes;
    few_values<R, 1>(f, first, v, v_step, column, part, n);
  }
}

// f(count, first) for groups of up to four rows; count.value is known to the compiler.
template <int R>
struct Count {
  static constexpr int value = R;
};
template <class F>
static inline void each_group(int rows, const F& f) {
  for (int first = 0; first < rows; first += 4) {
    switch (rows - first) {
      case 1:
        f(Count<1>(), first);
        break;
      case 2:
        f(Count<2>(), first);
        break;
      case 3:
        f(Count<3>(), first);
        break;
      default:
        f(Count<4>(), first);
    }
  }
}

// use(from, step) with n rows of K or of V of one head: a plain cache is read where it lies, a
// quantised one is decoded first.
template <class F>
static inline void cached_rows(const AttentionParams& p, const QuantRows& quant,
                               const half_bits* cache, int64_t row, int dim, int n, float* decoded,
                               const F& use) {
  if (quant.bits) {
    dequantise_rows(quant, row, p.kv_heads, dim, n, decoded);
    use(decoded, int64_t{dim});
  } else {
    use(cache + row * dim, static_cast<int64_t>(p.kv_heads) * dim);
  }
}

// One block of n keys.
static void few_block(const AttentionParams& p, const AttentionTask& t, FewRows& f, int64_t key,
                      int n) {
  const int rows = static_cast<int>(t.row_end - t.row_begin);
  f.offset = static_cast<int>(key % kLanes);
  const int64_t row = cache_slot(p, t.sequence, key) * p.kv_heads + t.kv_head;
  cached_rows(p, p.k_quant, p.k_cache, row, p.head_dim, n, f.decoded, [&](auto k, int64_t step) {
    each_group(rows, [&](auto count, int first) {
      few_scores<decltype(count)::value>(f, first, k, step, p.head_dim, n);
    });
  });
  for (int r = 0; r < rows; ++r) {
    const int64_t query = (t.row_begin + r) / group_size(p);
    const KeyRange seen = visible_keys(p, t.sequence, query);
    const int64_t end = seen.end < key + n ? seen.end : key + n;
    const int64_t begin = (seen.begin > key ? seen.begin : key) - key + f.offset;
    few_softmax(f, r, begin, end - key + f.offset, n + f.offset, p.softcap);
  }
  cached_rows(p, p.v_quant, p.v_cache, row, p.v_head_dim, n, f.decoded, [&](auto v, int64_t step) {
    each_group(rows, [&](auto count, int first) {
      few_all_values<decltype(count)::value>(f, first, v, step, p.v_head_dim, n);
    });
  });
}

static void few_queries(const AttentionParams& p, const AttentionTask& t, FewRows& f,
                        float* scratch) {
  f.q_step = padded(p.head_dim);
  f.v_step = padded(p.v_head_dim);
  f.score = scratch;
  f.q = f.score + kFewRows * kScoreStep;
  f.sum_v = f.q + kFewRows * f.q_step;
  f.decoded = f.sum_v + kFewRows * f.v_step;
  for (int64_t r = 0; r < t.row_end - t.row_begin; ++r) {
    const float* q = query_row(p, t.sequence, t.kv_head, t.row_begin + r);
    float* to = f.q + r * f.q_step;
    vstore(to + f.q_step - kLanes, vzero());
    scale_row(q, to, p.head_dim, p.scale, nullptr, 0.0f);
    if (p.k_quant.bits) rotate_blocks(to, p.head_dim);
  }
}

// The result of keys [begin, end) of one chunk.
static void few_chunk(const AttentionParams& p, const AttentionTask& t, FewRows& f, int64_t begin,
                      int64_t end, float* to) {
  const int rows = static_cast<int>(t.row_end - t.row_begin);
  for (int r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < f.v_step; i += kLanes) vstore(f.sum_v + r * f.v_step + i, vzero());
    f.top[r] = -__builtin_inff();
    f.sum[r] = 0;
  }
  for (int64_t key = begin; key < end;) {
    const int64_t next = block_end(key, end);
    few_block(p, t, f, key, static_cast<int>(next - key));
    key = next;
  }
  for (int r = 0; r < rows; ++r, to += partial_stride(p)) {
    const float* from = f.sum_v + r * f.v_step;
    each_vector(p.v_head_dim, [&](int64_t i, int n) { store_n(to + i, load_n(from + i, n), n); });
    to[p.v_head_dim] = f.top[r];
    to[p.v_head_dim + 1] = f.sum[r];
  }
}

}  // namespace exl3::EXL3_LEVEL
