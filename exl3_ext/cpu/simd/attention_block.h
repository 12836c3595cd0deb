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
constexpr int kRowStep = kAttentionRows;  // floats between rows of Q^T, S and O^T

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

// Scores of one vector of rows become exp(score - greatest so far); returns the factor that what
// was summed before must take.
static inline vec softmax_lanes(BlockRows& f, int lane, int n) {
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
  vec sum[2] = {vzero(), vzero()};
#pragma GCC unroll 4
  for (t = 0; t < n; ++t) {
    const vec e = vexp(vload(s + t * kRowStep) - base);
    vstore(s + t * kRowStep, e);
    sum[t & 1] = sum[t & 1] + e;
  }
  const vec keep = vexp(old - base);
  vstore(f.top + lane, top);
  vstore(f.sum + lane, vfma(vload(f.sum + lane), keep, sum[0] + sum[1]));
  return keep;
}

// N vectors of rows from `lane` on, over one block of n keys.
template <int N>
static void block_step(const AttentionParams& p, BlockRows& f, int lane, int64_t key, int n,
                       bool first) {
  float* s = f.score + lane;
  product<N>({f.k, p.head_dim, 1}, n, f.q + lane, p.head_dim, s, nullptr);
  vec keep[N];
  for (int i = 0; i < N; ++i) {
    if (p.softcap > 0) cap_scores(s + i * kLanes, n, p.softcap);
    mask_lanes(f, lane + i * kLanes, key, n);
    keep[i] = softmax_lanes(f, lane + i * kLanes, n);
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

static inline void block_finish(const AttentionParams& p, const AttentionTask& t,
                                const BlockRows& f, int lane, float* partial) {
  const int64_t rows = t.row_end - t.row_begin;
  const int64_t count = rows - lane < kLanes ? rows - lane : kLanes;
  const vec sum = vload(f.sum + lane);
  vec scale = vselect(vless(vzero(), sum), vset(1.0f) / sum, sum);  // no key: 0; NaN stays
  if (t.partial >= 0) scale = vset(1.0f);
  float* out[kLanes];
  for (int i = 0; i < count; ++i) {
    const int64_t row = lane + i;
    out[i] = t.partial >= 0 ? partial + t.partial + row * partial_stride(p)
                            : output_row(p, t.sequence, t.kv_head, t.row_begin + row);
    if (t.partial < 0) continue;
    out[i][p.v_head_dim] = f.top[row];
    out[i][p.v_head_dim + 1] = f.sum[row];
  }
  if (p.v_quant.bits && t.partial < 0) rotate_lanes(f.sum_v + lane, kRowStep, p.v_head_dim);
  for (int c = 0; c < p.v_head_dim; c += kLanes) {
    const int n = p.v_head_dim - c < kLanes ? p.v_head_dim - c : kLanes;
    vec block[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      block[i] = i < n ? vload(f.sum_v + (c + i) * kRowStep + lane) * scale : vzero();
    }
    vtranspose(block);
    for (int i = 0; i < count; ++i) store_n(out[i] + c, block[i], n);
  }
}

static void prepare_rows(const AttentionParams& p, const AttentionTask& t, BlockRows& f,
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
    f.top[r] = -__builtin_inff();
    f.sum[r] = 0;
  }
}

static void attention_block(const AttentionParams& p, const AttentionTask& t, float* partial,
                            float* scratch) {
  BlockRows f;
  prepare_rows(p, t, f, scratch);
  const int vectors = static_cast<int>((t.row_end - t.row_begin + kLanes - 1) / kLanes);
  for (int i = 0; i < vectors; ++i) load_queries(p, t, f, i * kLanes);
  for (int64_t key = t.key_begin; key < t.key_end;) {
    const int64_t end = block_end(key, t.key_end);
    const int n = static_cast<int>(end - key);
    const int64_t row = cache_slot(p, t.sequence, key) * p.kv_heads + t.kv_head;
    convert_rows(p.k_cache, p.k_quant, row, p.kv_heads, p.head_dim, n, f.k);
    convert_rows(p.v_cache, p.v_quant, row, p.kv_heads, p.v_head_dim, n, f.v);
    const bool first = key == t.key_begin;
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
    key = end;
  }
  for (int i = 0; i < vectors; ++i) block_finish(p, t, f, i * kLanes, partial);
}

}  // namespace exl3::EXL3_LEVEL
