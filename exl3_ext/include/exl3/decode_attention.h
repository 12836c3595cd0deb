#pragma once
#include "exl3/attention.h"

namespace exl3 {

// A decode step of attention in one launch: head norms and rotation of the new rows' q and k, their
// K and V into the cache, attention over the cache and them. As `rope_append` and `attention`, but
// qkv is left as it is, and what the new rows see of each other comes from qkv, not from the cache.
//
// Row b * queries + i is query i of sequence b, at position seq_lens[b] - queries + i.
struct DecodeAttentionParams {
  const void* qkv;            // [rows, q_heads * head_dim + kv_heads * (head_dim + v_head_dim)]
  DType dtype;                // of qkv and out: float32 or float16
  const float* table;         // [rows, rot]: [cos | sin]; unused when rot is 0
  half_bits* k_cache;         // [pages, 256, kv_heads, head_dim]
  half_bits* v_cache;         // [pages, 256, kv_heads, v_head_dim]
  const int64_t* slots;       // [rows]: page * 256 + offset; outside the cache: not stored
  const int32_t* page_table;  // [sequences, max_pages]
  const int32_t* seq_lens;    // [sequences], the new rows included; a bad length counts as 0
  const float* q_norm;        // [head_dim] or null
  const float* k_norm;        // [head_dim] or null
  void* out;                  // [rows, q_heads * v_head_dim] row-major
  int64_t stride;             // elements between rows of qkv
  int64_t sequences, pages, max_pages;
  int queries, q_heads, kv_heads, head_dim, v_head_dim;
  int rot;                 // even, <= head_dim
  float eps, norm_offset;  // norm weight is (w + norm_offset)
  bool interleaved;        // pairs (2i, 2i+1); else (i, i + rot/2)
  float scale, softcap;    // softcap 0: off
  int window;              // keys that a query sees, itself included; 0: all
  bool causal;
  bool ahead;   // the launch before writes none of: cache, slots, page table, lengths, norms
  int cluster;  // thread blocks that share a sequence's keys: 1, 2, 4, 8 or 16
};

// The choice of `cluster` for these sizes on the current device; 0: no instance of the one-launch
// kernel serves them.
int plan_decode_attention(const DecodeAttentionParams& p);

Status decode_attention_cuda(const DecodeAttentionParams& p, CudaStream stream);

}  // namespace exl3
