#pragma once
#include "exl3/kv_quant.h"
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

// table[i] = [cos(a) | sin(a)] * scale with a = positions[i] * inv_freq, a in double precision.
struct RopeTableParams {
  const int32_t* positions;  // [rows]
  const float* inv_freq;     // [half]
  float* table;              // [rows, 2 * half] row-major
  int64_t rows, half;
  float scale;
};

// Per row of qkv, in place: RMS norm of each q and k head (optional), rotation of the first `rot`
// dims of each q and k head, then K and V into the cache as float16 or quantised (optional).
//
// T: float, or half_bits on CUDA; the CPU has float32 activations only.
template <class T>
struct RopeAppend {
  T* qkv;                         // [rows, q_heads * head_dim + kv_heads * (head_dim + v_head_dim)]
  const float* table;             // [rows, rot]: [cos | sin]; unused when rot is 0
  half_bits* k_cache;             // [pages, 256, kv_heads, head_dim] or null
  half_bits* v_cache;             // [pages, 256, kv_heads, v_head_dim] or null
  QuantRowsOut k_quant, v_quant;  // in their place if bits is not 0: rows [pages, 256, kv_heads]
  const int64_t* slots;  // [rows]: page * 256 + offset; < 0: not stored; null without a cache
  const float* q_norm;   // [head_dim] or null
  const float* k_norm;   // [head_dim] or null
  int64_t rows, stride;  // stride: elements between rows of qkv
  int64_t total_slots;   // pages * 256; a slot past it is kOutOfRange and nothing is written;
                         // on CUDA it counts as below 0
  int q_heads, kv_heads, head_dim, v_head_dim;
  int rot;                 // even, <= head_dim
  float eps, norm_offset;  // norm weight is (w + norm_offset)
  bool interleaved;        // pairs (2i, 2i+1); else (i, i + rot/2)
};
using RopeAppendParams = RopeAppend<float>;

Status rope_table_cpu(const RopeTableParams& p);
Status rope_append_cpu(const RopeAppendParams& p);
Status rope_table_cuda(const RopeTableParams& p, CudaStream stream);
template <class T>
Status rope_append_cuda(const RopeAppend<T>& p, CudaStream stream);

}  // namespace exl3
