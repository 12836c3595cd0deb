// Rotary tables, and per row: head norms, rotation, K and V into the paged cache.
// Work split: tables: one thread an angle, in double precision. Append: one warp a head of a row, a
// lane owns every 32nd pair. Bound: latency in decode, bytes in prefill.
#include <cuda_runtime.h>

#include "cuda/common/vector.cuh"
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

  __device__ void turn(int lane, int dim, int rot, bool interleaved) const {
    const int half = rot / 2;
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
    __half* to = reinterpret_cast<__half*>(p.v_cache) +
                 (slot * p.kv_heads + v_head) * static_cast<int64_t>(p.v_head_dim);
    for (int i = lane; i < p.v_head_dim; i += kWarp) to[i] = __float2half_rn(to_float<V>(x[i]));
    return;
  }
  Head<V> h;
  h.x = x + static_cast<int64_t>(head) * p.head_dim;
  h.norm = head < p.q_heads ? p.q_norm : p.k_norm;
  h.table = p.table + row * p.rot;
  h.cache = stored ? reinterpret_cast<__half*>(p.k_cache) +
                         (slot * p.kv_heads + head - p.q_heads) * static_cast<int64_t>(p.head_dim)
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
