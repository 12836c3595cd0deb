// The kernel of paged attention, for head dims up to D.
#pragma once
#include <type_traits>

#include "cuda/attention/merge.cuh"
#include "cuda/attention/quant_tiles.cuh"

namespace exl3::cuda {

constexpr float kLog2E = 1.4426950408889634f;

constexpr int kSmallKeys = 32;  // of a tile, where shared memory is short

// Decode: 16 rows, each warp takes its own 16 keys of a tile. Else 64 rows, 16 a warp. A quantised
// cache has one stage: its words are what is copied ahead. With kSmallKeys there is one of both.
template <int kDim, bool kFewRows, bool kQuantised, int kTileSize = kTileKeys>
struct AttentionShape {
  static constexpr int D = kDim, kKeys = kTileSize;
  static constexpr bool kDecode = kFewRows, kQuant = kQuantised;
  static constexpr bool kSmall = kKeys == kSmallKeys;
  static constexpr int kRows = kDecode ? 16 : 64;
  static constexpr int kWarps = kDecode ? kKeys / 16 : kRows / 16;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kWarpKeys = kDecode ? 16 : kKeys;
  static constexpr int kBlocks = kQuant && kDecode && D <= 128 && !kSmall ? 4 : 0;  // 0: any
  static constexpr int kStride = D + 8;  // halves; rows of a matrix fall into different banks
  static constexpr int kStages = D <= 128 && !kQuant && !kSmall ? 2 : 1;
  static constexpr int kWordStages = kSmall ? 1 : 2;
  static constexpr int kTile = kKeys * kStride;  // halves of K or V of one stage
  static constexpr int kParts = kDecode ? kWarps : 1;
  static constexpr int kTilesBytes = kStages * 2 * kTile * 2;
  static constexpr int kPartsBytes = kParts * kRows * (D + 2) * 4;  // in place of the tiles
  static constexpr int kWeightsBytes = kMostChunks * kRows * 4;     // too
  static constexpr int kMore = kPartsBytes > kWeightsBytes ? kPartsBytes : kWeightsBytes;
  static constexpr int kLargest = kTilesBytes > kMore ? kTilesBytes : kMore;
  static constexpr int kBytes = kRows * kStride * 2 + kLargest;  // and the words of quantised tiles
  static constexpr int kMostBytes = kBytes + (kQuant ? kWordStages * 2 * kKeys * D : 0);

  // Turing has 64 KB; the kernel itself takes a few.
  static_assert(!kSmall || kMostBytes < 63 * 1024);

  // Of shared memory, for this problem.
  static int bytes(const Attention<void>& a) {
    return kBytes + (kQuant ? kWordStages * quant_tile_bytes(a, kKeys) : 0);
  }
};

// Rows of q as float16 in shared memory, zero outside rows and head dim.
template <class Shape, class T>
static __device__ __forceinline__ void load_queries(__half* to, const Attention<void>& a,
                                                    const Tile& t, int kv_head) {
  const T* q = static_cast<const T*>(a.q);
  const bool wide = wide_rows(q, a.q_stride) && a.head_dim % kVector == 0;
  constexpr int kVectors = Shape::D / kVector;
  for (int i = threadIdx.x; i < Shape::kRows * kVectors; i += Shape::kThreads) {
    const int r = i / kVectors, column = i % kVectors * kVector;
    float v[kVector] = {};
    if (r < t.rows) {
      load_part(q + row_offset(a, t, kv_head, r, a.q_stride, a.head_dim), column, a.head_dim, wide,
                v);
    }
    store8(to + r * Shape::kStride + column, v);
  }
}

// The same, rotated for a quantised cache: a warp takes four blocks of its rows at a time.
template <class Shape, class T>
static __device__ __forceinline__ void load_turned_queries(__half* to, const Attention<void>& a,
                                                           const Tile& t, int kv_head) {
  constexpr int kBlocks = Shape::D / kQuantBlock, kAtOnce = 4;
  const T* q = static_cast<const T*>(a.q);
  const int lane = threadIdx.x % kWarp, blocks = quant_blocks(a.head_dim);
  for (int i = threadIdx.x / kWarp; i < Shape::kRows / kAtOnce * kBlocks; i += Shape::kWarps) {
    const int first = i / kBlocks, block = i % kBlocks, column = block * kQuantBlock + lane;
    float v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int r = first * kAtOnce + j;
      v[j] = 0.0f;
      if (r < t.rows && column < a.head_dim) {
        v[j] = to_float<T>(q[row_offset(a, t, kv_head, r, a.q_stride, a.head_dim) + column]);
      }
    }
    const int size = block < blocks ? quant_block_size(a.head_dim, block) : kQuantBlock;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int r = first * kAtOnce + j;
      if (r < t.rows) v[j] = rotate_lanes(v[j], size);
      to[r * Shape::kStride + block * kQuantBlock + decoded_place(lane, block)] =
          __float2half_rn(v[j]);
    }
  }
}

// Starts the copy of one tile of K or V; keys outside [begin, end) become zero and are not read.
template <class Shape>
static __device__ __forceinline__ void load_keys(__half* to, const half_bits* cache, int64_t page,
                                                 int kv_heads, int kv_head, int dim, int key0,
                                                 int begin, int end) {
  const int64_t stride = static_cast<int64_t>(kv_heads) * dim;
  const half_bits* from =
      cache + (page * kPageSize + key0 % kPageSize) * stride + static_cast<int64_t>(kv_head) * dim;
  constexpr int kVectors = Shape::D / kVector;
#pragma unroll
  for (int i = threadIdx.x; i < Shape::kKeys * kVectors; i += Shape::kThreads) {
    const int key = i / kVectors, column = i % kVectors * kVector;
    const bool valid = column < dim && key0 + key >= begin && key0 + key < end;
    copy_async<16>(to + key * Shape::kStride + column, valid ? from + key * stride + column : cache,
                   valid);
  }
}

// Where the keys of a block come from: those from `first` on, before `end`, in tiles from `begin`.
struct KeySource {
  const Attention<void>& a;
  const int32_t* pages;  // of the sequence
  int kv_head, begin, first, end;

  __device__ __forceinline__ bool known(int key0) const {
    const int page = pages[key0 / kPageSize];
    return page >= 0 && page < a.pages;
  }
};

// Tiles of a float16 cache: copied, two ahead where there is room.
template <class Shape>
struct PlainTiles {
  const KeySource& keys;
  __half* room;

  __device__ __forceinline__ void load(int key0) {
    if (!keys.known(key0)) return;
    const Attention<void>& a = keys.a;
    const int64_t page = keys.pages[key0 / kPageSize];
    __half* to = place(key0);
    load_keys<Shape>(to, a.k_cache, page, a.kv_heads, keys.kv_head, a.head_dim, key0, keys.first,
                     keys.end);
    load_keys<Shape>(to + Shape::kTile, a.v_cache, page, a.kv_heads, keys.kv_head, a.v_head_dim,
                     key0, keys.first, keys.end);
  }
  __device__ __forceinline__ __half* place(int key0) const {
    return room + (key0 - keys.begin) / Shape::kKeys % Shape::kStages * 2 * Shape::kTile;
  }

  __device__ __forceinline__ void start() {
    if (keys.begin < keys.end) load(keys.begin);
    copy_commit();
  }
  // The tile, for all threads.
  __device__ __forceinline__ const __half* take(int key0) {
    if (Shape::kStages == 2 && key0 + Shape::kKeys < keys.end) load(key0 + Shape::kKeys);
    copy_commit();
    copy_wait<Shape::kStages - 1>();
    __syncthreads();
    return place(key0);
  }
  // After its use.
  __device__ __forceinline__ void leave(int key0) {
    __syncthreads();
    if (Shape::kStages == 1 && key0 + Shape::kKeys < keys.end) load(key0 + Shape::kKeys);
  }
};

// Tiles of a quantised cache: words are copied one tile ahead and decoded when it is their turn.
// With room for the words of one tile, the next ones are copied after that.
template <class Shape>
struct DecodedTiles {
  using Part = QuantTile<Shape::D, Shape::kThreads, Shape::kKeys>;
  const KeySource& keys;
  __half* room;
  uint32_t* words;  // kWordStages tiles of K and V
  Part k, v;
  int k_words, v_words;

  __device__ __forceinline__ DecodedTiles(const KeySource& source, __half* tiles)
      : keys(source), room(tiles) {
    const Attention<void>& a = keys.a;
    words = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(tiles) + Shape::kLargest);
    k.start(a.k_quant, a.head_dim);
    v.start(a.v_quant, a.v_head_dim);
    k_words = tile_words(a.k_quant, a.head_dim, Shape::kKeys);
    v_words = tile_words(a.v_quant, a.v_head_dim, Shape::kKeys);
  }

  __device__ __forceinline__ uint32_t* place(int key0) const {
    return words + (key0 - keys.begin) / Shape::kKeys % Shape::kWordStages * (k_words + v_words);
  }
  __device__ __forceinline__ void load(int key0) {
    if (!keys.known(key0)) return;
    const int64_t page = keys.pages[key0 / kPageSize];
    const int64_t row = (page * kPageSize + key0 % kPageSize) * keys.a.kv_heads + keys.kv_head;
    const int left = keys.end - key0 < Shape::kKeys ? keys.end - key0 : Shape::kKeys;
    const TileKeys own{row, keys.a.kv_heads, keys.first - key0, left};
    k.copy(place(key0), own);
    v.copy(place(key0) + k_words, own);
  }

  __device__ __forceinline__ void start() {
    if (keys.begin < keys.end) load(keys.begin);
    copy_commit();
  }
  __device__ __forceinline__ void load_next(int key0) {
    if (key0 + Shape::kKeys < keys.end) load(key0 + Shape::kKeys);
    copy_commit();
  }
  __device__ __forceinline__ const __half* take(int key0) {
    __half k_scales[Part::kRecords], v_scales[Part::kRecords];
#pragma unroll
    for (int r = 0; r < Part::kRecords; ++r) {
      k_scales[r] = k.scales[r];
      v_scales[r] = v.scales[r];
    }
    copy_wait<0>();
    __syncthreads();  // also: the tile before is used up
    if (!Shape::kSmall) load_next(key0);
    if (keys.known(key0)) {
      k.template decode<Shape::kStride>(place(key0), room, k_scales);
      v.template decode<Shape::kStride>(place(key0) + k_words, room + Shape::kTile, v_scales);
    }
    __syncthreads();
    if (Shape::kSmall) load_next(key0);
    return room;
  }
  __device__ __forceinline__ void leave(int key0) {}
};

template <class Shape>
using TilesOf = std::conditional_t<Shape::kQuant, DecodedTiles<Shape>, PlainTiles<Shape>>;

// Running softmax of the 16 rows of a warp; a lane holds rows lane / 4 and lane / 4 + 8.
template <class Shape>
struct WarpState {
  static constexpr int D = Shape::D;
  static constexpr int kTilesN = Shape::kWarpKeys / 8;
  float out[D / 8][4];
  float top[2], sum[2];
  int low[2], high[2];  // keys that the row sees

  __device__ __forceinline__ void start(const Attention<void>& a, const Tile& t, int first_row,
                                        int chunk_end) {
    const int group = a.q_heads / a.kv_heads, lane = threadIdx.x % kWarp;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = -INFINITY;
      sum[i] = 0.0f;
      const int r = first_row + lane / 4 + 8 * i;
      const int position = t.length - t.queries + (t.first_row + r) / group;
      int end = a.causal ? position + 1 : t.length;
      end = end < chunk_end ? end : chunk_end;
      high[i] = r < t.rows && position >= 0 ? end : 0;
      low[i] = a.window ? position - a.window + 1 : 0;
    }
  }

  // Scores of this warp's keys in base 2, masked.
  __device__ __forceinline__ void scores(float (&s)[kTilesN][4], const __half* q, const __half* k,
                                         const Attention<void>& a, int key0) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
    }
    const __half* q_row = q + (lane % 16) * Shape::kStride + lane / 16 * 8;
    const __half* k_row = k + (lane / 16 * 8 + lane % 8) * Shape::kStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      unsigned x[4];
      load_matrices(x, q_row + d);
#pragma unroll
      for (int n = 0; n < kTilesN; n += 2) {
        unsigned y[4];
        load_matrices(y, k_row + n * 8 * Shape::kStride + d);
        multiply_16x8x16(s[n], x, y[0], y[1]);
        multiply_16x8x16(s[n + 1], x, y[2], y[3]);
      }
    }
    const float scale = a.softcap > 0.0f ? a.scale / a.softcap : a.scale * kLog2E;
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = key0 + n * 8 + lane % 4 * 2 + i % 2;
        float v = s[n][i] * scale;
        if (a.softcap > 0.0f) v = a.softcap * kLog2E * tanhf(v);
        s[n][i] = key >= low[i / 2] && key < high[i / 2] ? v : -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void weigh(float (&s)[kTilesN][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float best = top[i];
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) best = fmaxf(best, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
      best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 1));
      best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 2));
      const float base = best == -INFINITY ? 0.0f : best;
      const float shrink = exp2_fast(top[i] - base);
      top[i] = best;
      float total = 0.0f;
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
        for (int j = 2 * i; j < 2 * i + 2; ++j) {
          s[n][j] = exp2_fast(s[n][j] - base);
          total += s[n][j];
        }
      }
      sum[i] = fmaf(sum[i], shrink, total);
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        out[n][2 * i] *= shrink;
        out[n][2 * i + 1] *= shrink;
      }
    }
  }

  __device__ __forceinline__ void add_values(const float (&s)[kTilesN][4], const __half* v) {
    const int lane = threadIdx.x % kWarp;
    const __half* v_row = v + (lane / 8 % 2 * 8 + lane % 8) * Shape::kStride + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kTilesN; k += 2) {
      const unsigned x[4] = {pack_halves(s[k][0], s[k][1]), pack_halves(s[k][2], s[k][3]),
                             pack_halves(s[k + 1][0], s[k + 1][1]),
                             pack_halves(s[k + 1][2], s[k + 1][3])};
#pragma unroll
      for (int n = 0; n < D / 8; n += 2) {
        unsigned y[4];
        load_matrices_transposed(y, v_row + k * 8 * Shape::kStride + n * 8);
        multiply_16x8x16(out[n], x, y[0], y[1]);
        multiply_16x8x16(out[n + 1], x, y[2], y[3]);
      }
    }
  }

  // To shared memory, as one part of `parts`.
  __device__ __forceinline__ void save(float* values, float* maxima, float* sums) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane / 4 + 8 * i;
      float total = sum[i];
      total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
      total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
      if (lane % 4 == 0) maxima[r] = top[i], sums[r] = total;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        float2* to = reinterpret_cast<float2*>(values + r * D + n * 8 + lane % 4 * 2);
        *to = make_float2(out[n][2 * i], out[n][2 * i + 1]);
      }
    }
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_kernel(AttentionCudaParams p) {
  constexpr int D = Shape::D;
  constexpr bool kDecode = Shape::kDecode, kQuant = Shape::kQuant;
  extern __shared__ __align__(16) __half room[];
  __half* q = room;
  __half* tiles = room + Shape::kRows * Shape::kStride;
  const Attention<void>& a = p.a;
  if (blockIdx.x == 0 && blockIdx.y == 0) clear_other_rows(p);
  const int kv_head = blockIdx.x % a.kv_heads;
  // Long causal tiles first.
  const int64_t index = kDecode ? blockIdx.x / a.kv_heads : p.tiles - 1 - blockIdx.x / a.kv_heads;
  const int64_t part_index = (index * a.kv_heads + kv_head) * p.max_chunks;
  Tile t;
  if (!find_tile(p, index, t)) return;
  const int chunk = blockIdx.y;
  if (chunk >= t.chunks) return;
  const int begin = t.begin / kTileKeys * kTileKeys + chunk * t.chunk;
  const int end = t.end < begin + t.chunk ? t.end : begin + t.chunk;
  const int32_t* pages = a.page_table + static_cast<int64_t>(t.sequence) * a.max_pages;
  const KeySource keys{a, pages, kv_head, begin, t.begin, end};
  TilesOf<Shape> source{keys, tiles};
  source.start();
  const auto queries = [&](auto zero) {
    using T = decltype(zero);
    if constexpr (kQuant)
      load_turned_queries<Shape, T>(q, a, t, kv_head);
    else
      load_queries<Shape, T>(q, a, t, kv_head);
  };
  if (p.dtype == DType::kFloat16)
    queries(__half());
  else
    queries(0.0f);
  const int warp = threadIdx.x / kWarp;
  const int warp_row = kDecode ? 0 : warp * 16, warp_key = kDecode ? warp * Shape::kWarpKeys : 0;
  WarpState<Shape> state;
  state.start(a, t, warp_row, end);
  for (int key0 = begin; key0 < end; key0 += Shape::kKeys) {
    const __half* k = source.take(key0) + warp_key * Shape::kStride;
    if (keys.known(key0)) {
      float s[WarpState<Shape>::kTilesN][4];
      state.scores(s, q + warp_row * Shape::kStride, k, a, key0 + warp_key);
      state.weigh(s);
      state.add_values(s, k + Shape::kTile);
    }
    source.leave(key0);
  }
  copy_wait<0>();
  __syncthreads();
  float* values = reinterpret_cast<float*>(tiles);
  float* maxima = values + Shape::kParts * Shape::kRows * D;
  float* sums = maxima + Shape::kParts * Shape::kRows;
  state.save(values + warp * 16 * D, maxima + warp * 16, sums + warp * 16);
  __syncthreads();
  const int64_t stride = static_cast<int64_t>(p.tile_rows) * (a.v_head_dim + 2);
  float* first = t.chunks > 1 ? p.partials + part_index * stride : nullptr;
  write_rows<kQuant>(p, t, kv_head, first ? first + chunk * stride : nullptr,
                     {values, maxima, sums, Shape::kParts, Shape::kRows, D});
  if (!first || !is_last_chunk(p.counters + index * a.kv_heads + kv_head, t.chunks)) return;
  merge_chunks<kQuant>(p, t, kv_head, first, values);
}

}  // namespace exl3::cuda
