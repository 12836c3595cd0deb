// Rotary tables, and per row: head norms, rotation, K and V into the paged cache.
// Work split: tables: one thread an angle, in double precision. Append: one warp a head of a row, a
// lane owns every 32nd pair, or two at a time where whole heads turn. Bound: latency in decode,
// bytes in prefill.
#include <cuda_runtime.h>

#include "cuda/cache/kv_quant.cuh"
#include "exl3/rope.h"

namespace exl3 {
namespace {

using namespace cuda;

constexpr int kWarps = 4;
constexpr int kTableThreads = 128;

__global__ void __launch_bounds__(kTableThreads) table_kernel(RopeTableParams p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kTableThreads + threadIdx.x;
  if (at >= p.rows * p.half) return;
  const int64_t row = at / p.half, i = at % p.half;
  double sine, cosine;
  sincos(static_cast<double>(p.positions[row]) * static_cast<double>(p.inv_freq[i]), &sine,
         &cosine);
  float* to = p.table + row * 2 * p.half;
  to[i] = static_cast<float>(cosine * static_cast<double>(p.scale));
  to[p.half + i] = static_cast<float>(sine * static_cast<double>(p.scale));
}

__device__ __forceinline__ float2 load_pair(const float* p) {
  return *reinterpret_cast<const float2*>(p);
}
__device__ __forceinline__ float2 load_pair(const __half* p) {
  return __half22float2(*reinterpret_cast<const __half2*>(p));
}
__device__ __forceinline__ void store_pair(float* p, float a, float b) {
  *reinterpret_cast<float2*>(p) = make_float2(a, b);
}
__device__ __forceinline__ void store_pair(__half* p, float a, float b) {
  *reinterpret_cast<__half2*>(p) = __floats2half2_rn(a, b);
}

// Turns and scales one head in place, and stores it if `cache` is not null.
template <class T>
struct Head {
  T* x;
  const float* norm;
  const float* table;
  __half* cache;
  float scale, norm_offset;

  __device__ float value(int i) const {
    const float v = to_float<T>(x[i]) * scale;
    return norm ? v * (norm[i] + norm_offset) : v;
  }

  __device__ void put(int i, float v) const {
    x[i] = from_float<T>(v);
    if (cache) cache[i] = __float2half_rn(v);
  }

  // Two neighbouring values, and what becomes of them.
  __device__ float2 pair(int i) const {
    float2 v = load_pair(x + i);
    v.x *= scale, v.y *= scale;
    if (!norm) return v;
    const float2 n = *reinterpret_cast<const float2*>(norm + i);
    return make_float2(v.x * (n.x + norm_offset), v.y * (n.y + norm_offset));
  }

  __device__ void put_pair(int i, float a, float b) const {
    store_pair(x + i, a, b);
    if (cache) store_pair(cache + i, a, b);
  }

  // All of a head whose two halves turn into each other, in pairs.
  __device__ void turn_pairs(int lane, int half) const {
    for (int i = 2 * lane; i < half; i += 2 * kWarp) {
      const float2 c = *reinterpret_cast<const float2*>(table + i);
      const float2 s = *reinterpret_cast<const float2*>(table + half + i);
      const float2 u = pair(i), v = pair(i + half);
      put_pair(i, u.x * c.x - v.x * s.x, u.y * c.y - v.y * s.y);
      put_pair(i + half, v.x * c.x + u.x * s.x, v.y * c.y + u.y * s.y);
    }
  }

  __device__ void turn(int lane, int dim, int rot, bool interleaved) const {
    const int half = rot / 2;
    const bool aligned = reinterpret_cast<uintptr_t>(x) % (2 * sizeof(T)) == 0 &&
                         reinterpret_cast<uintptr_t>(table) % sizeof(float2) == 0 &&
                         reinterpret_cast<uintptr_t>(norm) % sizeof(float2) == 0;
    if (!interleaved && rot == dim && half % 2 == 0 && aligned) return turn_pairs(lane, half);
    for (int i = lane; i < half; i += kWarp) {
      const int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + half;
      const float c = table[i], s = table[half + i], u = value(a), v = value(b);
      put(a, u * c - v * s);
      put(b, v * c + u * s);
    }
    if (!norm && !cache) return;
    for (int i = rot + lane; i < dim; i += kWarp) put(i, value(i));
  }
};

template <class T, class V>
__global__ void __launch_bounds__(kWarps* kWarp) append_kernel(RopeAppend<T> p) {
  const int heads = p.q_heads + 2 * p.kv_heads;
  const int64_t task = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (task >= p.rows * heads) return;
  const int lane = threadIdx.x % kWarp, head = static_cast<int>(task % heads);
  const int64_t row = task / heads;
  V* x = reinterpret_cast<V*>(p.qkv) + row * p.stride;
  int64_t slot = -1;
  if (p.slots && head >= p.q_heads) slot = p.slots[row];
  const bool stored = slot >= 0 && slot < p.total_slots;
  const int v_head = head - p.q_heads - p.kv_heads;
  if (v_head >= 0) {
    if (!stored) return;
    x += static_cast<int64_t>(p.q_heads + p.kv_heads) * p.head_dim + v_head * p.v_head_dim;
    if (p.v_quant.bits) {
      quantise_head(x, p.v_head_dim, p.v_quant, slot * p.kv_heads + v_head);
      return;
    }
    __half* to = reinterpret_cast<__half*>(p.v_cache) +
                 (slot * p.kv_heads + v_head) * static_cast<int64_t>(p.v_head_dim);
    if (p.v_head_dim % 2 == 0 && reinterpret_cast<uintptr_t>(x) % (2 * sizeof(V)) == 0) {
      for (int i = 2 * lane; i < p.v_head_dim; i += 2 * kWarp) {
        const float2 v = load_pair(x + i);
        store_pair(to + i, v.x, v.y);
      }
      return;
    }
    for (int i = lane; i < p.v_head_dim; i += kWarp) to[i] = __float2half_rn(to_float<V>(x[i]));
    return;
  }
  Head<V> h;
  h.x = x + static_cast<int64_t>(head) * p.head_dim;
  h.norm = head < p.q_heads ? p.q_norm : p.k_norm;
  h.table = p.table + row * p.rot;
  const int64_t k_row = slot * p.kv_heads + head - p.q_heads;
  h.cache = stored && !p.k_quant.bits ? reinterpret_cast<__half*>(p.k_cache) + k_row * p.head_dim
                                      : nullptr;
  h.scale = 1.0f;
  h.norm_offset = p.norm_offset;
  if (h.norm) {
    float sum = 0.0f;
    for (int i = lane; i < p.head_dim; i += kWarp) {
      const float v = to_float<V>(h.x[i]);
      sum = fmaf(v, v, sum);
    }
    h.scale = 1.0f / sqrtf(sum_of_warp(sum) / static_cast<float>(p.head_dim) + p.eps);
  }
  h.turn(lane, p.head_dim, p.rot, p.interleaved);
  if (!stored || !p.k_quant.bits) return;
  __syncwarp();  // what other lanes turned is read now
  quantise_head(h.x, p.head_dim, p.k_quant, k_row);
}

}  // namespace

Status rope_table_cuda(const RopeTableParams& p, CudaStream stream) {
  const int64_t blocks = (p.rows * p.half + kTableThreads - 1) / kTableThreads;
  if (blocks == 0) return Status::kOk;
  table_kernel<<<static_cast<unsigned>(blocks), kTableThreads, 0, stream>>>(p);
  return launch_status();
}

template <class T>
Status rope_append_cuda(const RopeAppend<T>& p, CudaStream stream) {
  const int64_t blocks = (p.rows * (p.q_heads + 2 * p.kv_heads) + kWarps - 1) / kWarps;
  if (blocks == 0) return Status::kOk;
  append_kernel<T, typename DeviceType<T>::type>
      <<<static_cast<unsigned>(blocks), kWarps * kWarp, 0, stream>>>(p);
  return launch_status();
}

template Status rope_append_cuda<float>(const RopeAppend<float>&, CudaStream);
template Status rope_append_cuda<half_bits>(const RopeAppend<half_bits>&, CudaStream);

}  // namespace exl3
