#pragma once
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
struct AttentionParams {
  const float* q;               // [rows, q_heads * head_dim], rows q_stride apart
  const half_bits* k_cache;     // [pages, 256, kv_heads, head_dim]
  const half_bits* v_cache;     // [pages, 256, kv_heads, v_head_dim]
  const int32_t* page_table;    // [sequences, max_pages]
  const int32_t* seq_lens;      // [sequences], this step's tokens included
  const int32_t* query_starts;  // [sequences + 1], not decreasing
  float* out;                   // [rows, q_heads * v_head_dim] row-major
  int64_t rows, q_stride, sequences, pages, max_pages;
  int q_heads, kv_heads, head_dim, v_head_dim;
  float scale;
  float softcap;  // 0: off
  int window;     // keys that a query sees, itself included; 0: all
  bool causal;
};

Status attention_cpu(const AttentionParams& p);

}  // namespace exl3
