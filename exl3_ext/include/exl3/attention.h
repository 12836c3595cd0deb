#pragma once
#include "exl3/kv_quant.h"
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

// out = softmax(softcap(scale * q k^T) + mask) v over a paged cache, grouped query heads.
//
// Query i of sequence b (q_len = query_starts[b+1] - query_starts[b]) is row query_starts[b] + i at
// position seq_lens[b] - q_len + i. It sees keys [max(0, position - window + 1), end), where end is
// position + 1 (causal) or seq_lens[b]. A query that sees no key gets zeros, as do rows that belong
// to no sequence. Lengths, starts and pages are read when the launcher runs and checked there
// (kOutOfRange); pages and slots that no query sees are never read.
//
// T: float on the CPU; void on CUDA, where `AttentionCudaParams` says which. CUDA reports nothing
// at run time: there a bad length counts as 0, and keys of a bad page are left out.
template <class T>
struct Attention {
  const T* q;                   // [rows, q_heads * head_dim], rows q_stride apart
  const half_bits* k_cache;     // [pages, 256, kv_heads, head_dim]
  const half_bits* v_cache;     // [pages, 256, kv_heads, v_head_dim]
  QuantRows k_quant, v_quant;   // in place of k_cache and v_cache if bits is not 0: rows [pages,
                                // 256, kv_heads]; q and out are not rotated
  const int32_t* page_table;    // [sequences, max_pages]
  const int32_t* seq_lens;      // [sequences], this step's tokens included
  const int32_t* query_starts;  // [sequences + 1], not decreasing
  T* out;                       // [rows, q_heads * v_head_dim] row-major
  int64_t rows, q_stride, sequences, pages, max_pages;
  int q_heads, kv_heads, head_dim, v_head_dim;
  float scale;
  float softcap;  // 0: off
  int window;     // keys that a query sees, itself included; 0: all
  bool causal;
};
using AttentionParams = Attention<float>;

struct AttentionCudaParams {
  Attention<void> a;
  DType dtype;      // of q and out: float32 or float16
  int tile_rows;    // rows of a tile: 16 (decode) or 64; a row is one query of one q head
  int64_t tiles;    // enough for every sequence: rows * group / tile_rows + sequences
  bool small;       // tiles of 32 keys, for devices with little shared memory
  int max_chunks;   // parts that the keys of a tile may be split into
  float* partials;  // [tiles, kv_heads, max_chunks, tile_rows * (v_head_dim + 2)]; null for 1 chunk
  unsigned* counters;  // [tiles * kv_heads], zero on entry and on exit; null for 1 chunk
};

// Tiles and chunks for these sizes on the current device.
void plan_attention_cuda(AttentionCudaParams& p);

Status attention_cpu(const AttentionParams& p);
Status attention_cuda(const AttentionCudaParams& p, CudaStream stream);

}  // namespace exl3
