// New rows of a decode step: norm and rotation of a head, keys and values to the cache.
//
// A warp takes 8 rows: lane l has row l / 4 and of every 32 dims the 8 from 8 * (l % 4) on. So a
// load is 16 bytes, a rotation whose half is a multiple of 32 dims stays inside a lane, and four
// lanes make a row's sum. The same lanes hold these dims in the products (`DecodeState`).
#pragma once
#include "cuda/attention/decode_merge.cuh"

namespace exl3::cuda {

// The rows of a cluster: those of one sequence and kv head from `row0` on; row r is query
// r / group, q head r % group of the kv head.
struct DecodeRows {
  int sequence, kv_head, row0, rows, group;

  // item: over sequences, kv heads and tiles of most_rows rows, the last fastest.
  __device__ __forceinline__ DecodeRows(const DecodeAttentionParams& p, int item, int most_rows) {
    group = p.q_heads / p.kv_heads;
    const int all = p.queries * group, tiles = (all + most_rows - 1) / most_rows;
    row0 = item % tiles * most_rows;
    rows = all - row0 < most_rows ? all - row0 : most_rows;
    kv_head = item / tiles % p.kv_heads;
    sequence = item / tiles / p.kv_heads;
  }
  // Row of qkv of a query.
  __device__ __forceinline__ int64_t line(const DecodeAttentionParams& p, int query) const {
    return static_cast<int64_t>(sequence) * p.queries + query;
  }
};

// 16 bytes that other thread blocks wrote before: from the second-level cache. Zeros if not
// `valid`. No branch, so that all loads of a row are under way before the first is used.
static __device__ __forceinline__ uint4 load_fresh(const void* from, bool valid) {
  uint4 v;
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0;"
      " mov.b32 %3, 0; @p ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(from), "r"(static_cast<int>(valid)));
  return v;
}

// A lane's values of a row as they are in memory. T: __half or float.
template <class T, int D>
struct RawRow {
  static constexpr int kWords = sizeof(T) / 2;
  uint4 words[D / 32][kWords];

  // from: the lane's first value; those from `left` on do not exist.
  __device__ __forceinline__ void load(const T* from, int left) {
#pragma unroll
    for (int g = 0; g < D / 32; ++g) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[g][i] = load_fresh(from + 32 * g + i * (8 / kWords), 32 * g < left);
      }
    }
  }
  __device__ __forceinline__ void values(int g, float (&v)[8]) const {
    load8(reinterpret_cast<const T*>(words[g]), v);
  }
  __device__ __forceinline__ uint4 halves(int g) const {
    if constexpr (sizeof(T) == 2) return words[g][0];
    float v[8];
    values(g, v);
    uint4 packed;
    store8(reinterpret_cast<__half*>(&packed), v);
    return packed;
  }
};

// Cosines and sines of a row at the dims of a lane. Halves that turn into each other: angles 2g and
// 2g + 1 are the cosines and sines of group g. Neighbours: angle g has the four cosines and the
// four sines of the pairs in group g.
template <int D>
struct Turn {
  static constexpr int kGroups = D / 32;
  const float* from[2][2];  // of even and odd groups
  int left[2];
  uint4 words[kGroups][2];

  __device__ __forceinline__ Turn(const float* table, int half, bool neighbours) {
    const int lane = threadIdx.x % 4 * (neighbours ? 4 : 8);
    const float *cosines = table + lane, *sines = cosines + half;
    from[0][0] = cosines;
    from[0][1] = neighbours ? sines : cosines + 4;
    from[1][0] = neighbours ? cosines + 16 : sines;
    from[1][1] = neighbours ? sines + 16 : sines + 4;
    left[0] = half - lane;
    left[1] = half - lane - (neighbours ? 16 : 0);
  }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[g][i] = load_fresh(from[g % 2][i] + 16 * (g & ~1), 16 * (g & ~1) < left[g % 2]);
      }
    }
  }

  // Spelled out, so that every copy of this code gives the same bits.
  static __device__ __forceinline__ void turn(float& a, float& b, float c, float s) {
    const float u = a, v = b;
    a = fmaf(-v, s, u * c);
    b = fmaf(u, s, v * c);
  }

  __device__ __forceinline__ void apply(float (&v)[kGroups][8], int half, bool neighbours) const {
    float angle[kGroups][8];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) load8(reinterpret_cast<const float*>(words[g]), angle[g]);
    if (neighbours) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (16 * g + 4 * static_cast<int>(threadIdx.x % 4) >= half) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          turn(v[g][2 * i], v[g][2 * i + 1], angle[g][i], angle[g][i + 4]);
      }
      return;
    }
#pragma unroll
    for (int h = 1; h <= kGroups / 2; ++h) {
      if (half != 32 * h) continue;
#pragma unroll
      for (int g = 0; g < h; ++g) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          turn(v[g][i], v[g + h][i], angle[2 * g][i], angle[2 * g + 1][i]);
      }
    }
  }
};

// The norm of a head: weights [D] in shared memory.
template <int D>
static __device__ __forceinline__ void norm_row(float (&v)[D / 32][8], const float* weight,
                                                const DecodeAttentionParams& p) {
  float sum = 0.0f;
#pragma unroll
  for (int g = 0; g < D / 32; ++g) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(v[g][i], v[g][i], sum);
  }
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(p.head_dim) + p.eps);
#pragma unroll
  for (int g = 0; g < D / 32; ++g) {
    float w[8];
    load8(weight + 32 * g + 8 * (threadIdx.x % 4), w);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[g][i] = v[g][i] * scale * (w[i] + p.norm_offset);
  }
}

// What one warp makes: warps 0 and 1 a tile of 8 rows of q, the last two 8 new keys and values
// each, if the thread block has them. Rows that do not exist become zeros. In `bring_keys` every
// warp 8 keys and values of other sequences.
template <class T, int D, int kTiles>
struct RowTask {
  const T *row, *v_row;  // the lane's first value of q or k, of v
  int left, v_left;      // values from it on
  const float* weight;
  Turn<D> angles;
  uint4 *to, *v_to;            // the lane's row: of q or k, and of v; null: not to shared memory
  uint4 *k_cached, *v_cached;  // the lane's first unit of a new key in the cache; null: not stored
  int place;                   // the lane's row
  bool any, keys;

  // The lane's row among those of q or of the new keys.
  static __device__ __forceinline__ int lane_row() {
    return static_cast<int>(threadIdx.x) / kWarp % 2 * 8 +
           static_cast<int>(threadIdx.x % kWarp) / 4;
  }
  // Its query.
  static __device__ __forceinline__ int lane_query(const DecodeAttentionParams& p,
                                                   const DecodeRows& own) {
    const bool keys = threadIdx.x / kWarp >= 2;
    const int r = has_row(p, own) ? lane_row() : 0;
    return keys ? r : (own.row0 + r) / own.group;
  }
  static __device__ __forceinline__ bool has_row(const DecodeAttentionParams& p,
                                                 const DecodeRows& own) {
    return lane_row() < (threadIdx.x / kWarp >= 2 ? p.queries : own.rows);
  }
  static __device__ __forceinline__ int lane_head(const DecodeAttentionParams& p,
                                                  const DecodeRows& own) {
    if (threadIdx.x / kWarp >= 2) return p.q_heads + own.kv_head;
    const int r = own.row0 + (has_row(p, own) ? lane_row() : 0);
    return own.kv_head * own.group + r % own.group;
  }

  // Row `line` of qkv, if that is `there`: of q head `head`, or of the keys and values.
  __device__ __forceinline__ RowTask(const DecodeAttentionParams& p, int kv_head, int64_t line,
                                     int head, bool is_key, bool there)
      : angles(p.table + line * p.rot, p.rot / 2, p.interleaved), keys(is_key) {
    const int lane = threadIdx.x % 4 * 8;
    row = static_cast<const T*>(p.qkv) + line * p.stride + head * p.head_dim + lane;
    v_row = static_cast<const T*>(p.qkv) + line * p.stride + (p.q_heads + p.kv_heads) * p.head_dim +
            kv_head * p.v_head_dim + lane;
    left = there ? p.head_dim - lane : 0;
    v_left = there && keys ? p.v_head_dim - lane : 0;
    k_cached = v_cached = nullptr;
  }

  __device__ __forceinline__ void set_cached(const DecodeAttentionParams& p, int kv_head,
                                             int64_t slot) {
    if (slot < 0 || slot >= p.pages * kPageSize) return;
    const int64_t at = slot * p.kv_heads + kv_head;
    k_cached = reinterpret_cast<uint4*>(p.k_cache + at * p.head_dim) + threadIdx.x % 4;
    v_cached = reinterpret_cast<uint4*>(p.v_cache + at * p.v_head_dim) + threadIdx.x % 4;
  }

  // A row of the thread block's own. query: `lane_query`. Reads nothing of the launch before.
  __device__ __forceinline__ RowTask(const DecodeAttentionParams& p, const DecodeRows& own,
                                     bool has_keys, const DecodeMemory& memory, int query)
      : RowTask(p, own.kv_head, own.line(p, query), lane_head(p, own), threadIdx.x / kWarp >= 2,
                has_row(p, own)) {
    const int64_t line = own.line(p, query);
    any = keys ? has_keys : threadIdx.x / kWarp < kTiles;
    weight = keys ? (p.k_norm ? memory.norms + D : nullptr) : (p.q_norm ? memory.norms : nullptr);
    place = lane_row();
    to = reinterpret_cast<uint4*>(keys ? memory.fresh : memory.q) + place * (D / 8);
    v_to = to + kStepKeys * (D / 8);
    if (any && keys && has_row(p, own) && own.row0 == 0) {
      set_cached(p, own.kv_head, p.slots[line]);
    }
    if (!keys && has_row(p, own)) {
      memory.out_at[place] = (line * p.q_heads + lane_head(p, own)) * p.v_head_dim;
    }
  }

  // The key and value of row `line` of another sequence, if that is `there`; to the cache alone.
  __device__ __forceinline__ RowTask(const DecodeAttentionParams& p, int kv_head,
                                     const float* norms, int64_t line, bool there)
      : RowTask(p, kv_head, line, p.q_heads + kv_head, true, there) {
    any = true;
    weight = p.k_norm ? norms + D : nullptr;
    place = 0;
    to = v_to = nullptr;
    if (there) set_cached(p, kv_head, p.slots[line]);
  }

  __device__ __forceinline__ void run(const DecodeAttentionParams& p) {
    if (!any) return;
    RawRow<T, D> raw, v;
    raw.load(row, left);
    angles.load();
    v.load(v_row, v_left);
    float x[D / 32][8];
#pragma unroll
    for (int g = 0; g < D / 32; ++g) raw.values(g, x[g]);
    if (weight) norm_row<D>(x, weight, p);
    angles.apply(x, p.rot / 2, p.interleaved);
    uint4 packed[D / 32];
#pragma unroll
    for (int g = 0; g < D / 32; ++g) {
      store8(reinterpret_cast<__half*>(&packed[g]), x[g]);
      if (!to) continue;
      to[k_unit(place, 4 * g + threadIdx.x % 4)] = packed[g];
      if (keys) v_to[v_unit(place, 4 * g + threadIdx.x % 4)] = v.halves(g);
    }
    if (!k_cached) return;
    const int lane = 8 * (threadIdx.x % 4);
#pragma unroll
    for (int g = 0; g < D / 32; ++g) {
      if (32 * g + lane < p.head_dim) k_cached[4 * g] = packed[g];
      if (32 * g + lane < p.v_head_dim) v_cached[4 * g] = v.halves(g);
    }
  }
};

// Keys and values of `count` rows of qkv from `line` on, which belong to other sequences: to the
// cache, from every thread block that reads them, the same bits from each. So none waits for
// another. Apart, as few launches have such rows.
template <class T, int D, int kTiles>
static __device__ __noinline__ void bring_keys(const DecodeAttentionParams& p, int kv_head,
                                               const float* norms, int64_t line, int count) {
#pragma unroll 1
  for (int first = threadIdx.x / kWarp * 8; first < count; first += kDecodeWarps * 8) {
    const int i = first + threadIdx.x % kWarp / 4;
    RowTask<T, D, kTiles>(p, kv_head, norms, line + (i < count ? i : 0), i < count).run(p);
  }
}

}  // namespace exl3::cuda
