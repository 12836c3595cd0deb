// Sums of parts of the keys: over the warps of a thread block, over its parts, over the cluster.
//
// Four columns of a row are a quad. Each thread block of a cluster finishes a power of two of quads
// of every row: the others send theirs to its inbox and count on its barrier.
#pragma once
#include "cuda/attention/decode_keys.cuh"
#include "cuda/common/cluster.cuh"

namespace exl3::cuda {

struct DecodeMemory {
  __half* keys;     // [warp][stage][K, V][16][D]
  __half* fresh;    // [K, V][16][D] of the new rows
  __half* q;        // [8 * kTiles][D]
  float* norms;     // [q, k][D]
  float* parts;     // [warp][row][D + 4]: sums of the part at hand
  float2* bases;    // [warp][16]: base and sum
  int64_t* out_at;  // [16]: where a row's output starts
  uint64_t* barrier;
  float4* inbox;    // [rank][row][quad of its share]
  float2* inbox_m;  // base and sum of each
  float4* saved;    // [level][row][quad]: sums of parts that wait for their right neighbours
  float2* saved_m;
};

// How many quads a row has, and a thread block of the cluster finishes (2^share_log).
struct DecodeShare {
  int width, share_log;

  __host__ __device__ __forceinline__ DecodeShare(int v_dim, int cluster) {
    width = v_dim / 4;
    share_log = 0;
    while (cluster << share_log < width) ++share_log;
  }
  __device__ __forceinline__ int own(int rank) const {
    const int left = width - (rank << share_log);
    return left < 0 ? 0 : left < 1 << share_log ? left : 1 << share_log;
  }
};

template <int D, int kTiles>
struct DecodeShape {
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kWarpHalves = kDecodeStages * 2 * kStepKeys * D;
  static constexpr int kPitch = D + 4;  // of `parts`; lanes of a warp fall into different banks

  static __host__ __device__ __forceinline__ int levels(int cluster) {
    int n = 0;
    for (int parts = kDecodeParts / cluster; parts > 1; parts /= 2) ++n;
    return n;
  }
  static __host__ __device__ __forceinline__ int bytes(int rows, int v_dim, int cluster) {
    const DecodeShare share(v_dim, cluster);
    const int records = rows * ((cluster << share.share_log) + levels(cluster) * share.width);
    return kDecodeWarps * (kWarpHalves * 2 + rows * kPitch * 4 + 16 * 8) + 2 * kStepKeys * D * 2 +
           kRows * D * 2 + 2 * D * 4 + 16 * 8 + 16 + records * 24;
  }
  static __device__ __forceinline__ DecodeMemory memory(unsigned char* room, int rows,
                                                        const DecodeShare& share, int cluster) {
    const int inbox = rows * (cluster << share.share_log);
    DecodeMemory m;
    m.keys = reinterpret_cast<__half*>(room);
    m.fresh = m.keys + kDecodeWarps * kWarpHalves;
    m.q = m.fresh + 2 * kStepKeys * D;
    m.norms = reinterpret_cast<float*>(m.q + kRows * D);
    m.parts = m.norms + 2 * D;
    m.bases = reinterpret_cast<float2*>(m.parts + kDecodeWarps * rows * kPitch);
    m.out_at = reinterpret_cast<int64_t*>(m.bases + kDecodeWarps * 16);
    m.barrier = reinterpret_cast<uint64_t*>(m.out_at + 16);
    m.inbox = reinterpret_cast<float4*>(m.barrier + 2);
    m.saved = m.inbox + inbox;
    m.inbox_m = reinterpret_cast<float2*>(m.saved + levels(cluster) * rows * share.width);
    m.saved_m = m.inbox_m + inbox;
    return m;
  }
};

// Four values of a row's output with its base and sum.
struct DecodePart {
  float4 v;
  float2 m;

  // This one first.
  __device__ __forceinline__ void add(const float4& w, const float2& n) {
    const float base = fmaxf(m.x, n.x);
    const float a = base_factor(m.x, base), b = base_factor(n.x, base);
    v.x = fmaf(v.x, a, w.x * b), v.y = fmaf(v.y, a, w.y * b);
    v.z = fmaf(v.z, a, w.z * b), v.w = fmaf(v.w, a, w.w * b);
    m = make_float2(base, fmaf(m.y, a, n.y * b));
  }
};

// Adds what the warps left of part `index` (of the thread block's), and the parts before it that it
// completes a subtree with. After the last one, with zeros for all that did not come, the sums go
// to the thread blocks that finish them.
template <int D, int kTiles>
static __device__ __forceinline__ void add_part(const DecodeMemory& memory,
                                                const DecodeShare& share, int rows, int index,
                                                bool last, int levels, int rank) {
  using Shape = DecodeShape<D, kTiles>;
  constexpr int kLanes = D / 4 < kWarp ? D / 4 : kWarp;  // to a row
  const int lane = threadIdx.x % kLanes;
#pragma unroll 1
  for (int row = threadIdx.x / kLanes; row < rows; row += kDecodeThreads / kLanes) {
#pragma unroll 1
    for (int quad = lane; quad < share.width; quad += kLanes) {
      DecodePart own{make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float2(-INFINITY, 0.0f)};
#pragma unroll
      for (int w = 0; w < kDecodeWarps; ++w) {
        const float* values = memory.parts + (w * rows + row) * Shape::kPitch + quad * 4;
        own.add(*reinterpret_cast<const float4*>(values), memory.bases[w * 16 + row]);
      }
#pragma unroll 1
      for (int level = 0; level < levels; ++level) {
        const int at = (level * rows + row) * share.width + quad;
        if (index >> level & 1) {
          DecodePart left{memory.saved[at], memory.saved_m[at]};
          left.add(own.v, own.m);
          own = left;
        } else if (!last) {
          memory.saved[at] = own.v;
          memory.saved_m[at] = own.m;
          break;
        }
      }
      if (!last) continue;
      const int owner = quad >> share.share_log;
      const int at = ((rank * rows + row) << share.share_log) + quad - (owner << share.share_log);
      send_counted(memory.inbox + at, memory.barrier, owner, own.v);
      send_counted(memory.inbox_m + at, memory.barrier, owner, own.m);
    }
  }
}

// Sums of the first `count` thread blocks of a cluster, as a binary tree over kDecodeParts leaves:
// a lane adds four, 2^lanes_log neighbouring lanes the rest. All lanes of a warp take part.
static __device__ __forceinline__ float finish_value(const DecodeMemory& memory, int step, int at,
                                                     int component, int count, int lanes_log) {
  const int first = (threadIdx.x & ((1 << lanes_log) - 1)) * 4;
  float2 m[4];
  float v[4];
  float base = -INFINITY;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int from = (first + r < count ? first + r : 0) * step + at;
    m[r] = memory.inbox_m[from];
    v[r] = reinterpret_cast<const float*>(memory.inbox + from)[component];
    base = fmaxf(base, m[r].x);
  }
  if (lanes_log > 0) base = fmaxf(base, __shfl_xor_sync(0xFFFFFFFFu, base, 1));
  if (lanes_log > 1) base = fmaxf(base, __shfl_xor_sync(0xFFFFFFFFu, base, 2));
  float total[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float factor = base_factor(m[r].x, base);
    v[r] = first + r < count ? v[r] * factor : 0.0f;
    total[r] = first + r < count ? m[r].y * factor : 0.0f;
  }
  float value = (v[0] + v[1]) + (v[2] + v[3]);
  float sum = (total[0] + total[1]) + (total[2] + total[3]);
  if (lanes_log > 0) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
  }
  if (lanes_log > 1) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, 2);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  }
  return sum == 0.0f ? 0.0f : __fdividef(value, sum);
}

// The thread block's share of the outputs.
template <class T>
static __device__ __forceinline__ void write_outputs(const DecodeAttentionParams& p, int rows,
                                                     const DecodeMemory& memory,
                                                     const DecodeShare& share, int rank,
                                                     int count) {
  const int lanes_log = p.cluster > 8 ? 2 : p.cluster > 4 ? 1 : 0;  // to a value
  const int log = share.share_log, values = rows << (log + 2);
#pragma unroll 1
  for (int base = threadIdx.x & ~(kWarp - 1); base < values << lanes_log; base += kDecodeThreads) {
    const int index = (base + static_cast<int>(threadIdx.x % kWarp)) >> lanes_log;
    const int i = index < values ? index : 0, component = i & 3;
    const int row = i >> (log + 2), quad = (i >> 2) & ((1 << log) - 1);
    const float value = finish_value(memory, rows << log, i >> 2, component, count, lanes_log);
    const int column = ((rank << log) + quad) * 4 + component;
    const bool first = (threadIdx.x & ((1 << lanes_log) - 1)) == 0;
    if (index < values && first && column < p.v_head_dim) {
      static_cast<T*>(p.out)[memory.out_at[row] + column] = from_float<T>(value);
    }
  }
}

}  // namespace exl3::cuda
