// Bindings of rotary embedding and attention.
#include <torch/csrc/stable/library.h>

#include "bind/attention_params.h"
#include "bind/cpu/launch.h"

namespace exl3::bind {
namespace {

Tensor rope_table(const Tensor& positions, const Tensor& inv_freq, double scale) {
  EXL3_CHECK_CPU("rope_table", inv_freq);
  RopeTableParams p = rope_table_params(positions, inv_freq, scale);
  Tensor table = allocate(inv_freq, {p.rows, 2 * p.half});
  p.table = data_mut<float>(table);
  launch("rope_table", rope_table_cpu, p, {positions, inv_freq, table});
  return table;
}

// NOLINTNEXTLINE: the parameters are the schema's
void rope_append_(const Tensor& qkv, const std::optional<Tensor>& table,
                  const std::optional<Tensor>& k_cache, const std::optional<Tensor>& v_cache,
                  const std::optional<Tensor>& slots, const std::optional<Tensor>& q_norm,
                  const std::optional<Tensor>& k_norm, int64_t q_heads, int64_t kv_heads,
                  int64_t head_dim, int64_t v_head_dim, double eps, double norm_offset,
                  bool interleaved) {
  EXL3_CHECK_CPU("rope_append_", qkv);
  const RopeAppendParams p = rope_append_params<float>(
      qkv, {table, k_cache, v_cache, slots, q_norm, k_norm},
      {q_heads, kv_heads, head_dim, v_head_dim, eps, norm_offset, interleaved});
  std::vector<Tensor> kept{qkv};
  for (const auto* t : {&table, &k_cache, &v_cache, &slots, &q_norm, &k_norm}) {
    if (t->has_value()) kept.push_back(**t);
  }
  launch("rope_append_", rope_append_cpu, p, {}, kept);
}

// NOLINTNEXTLINE: the parameters are the schema's
void rope_append_quant_(const Tensor& qkv, const std::optional<Tensor>& table,
                        const Tensor& k_words, const Tensor& k_scales, const Tensor& v_words,
                        const Tensor& v_scales, const Tensor& slots,
                        const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                        int64_t q_heads, int64_t kv_heads, int64_t head_dim, int64_t v_head_dim,
                        double eps, double norm_offset, bool interleaved) {
  const char* op = "rope_append_quant_";
  EXL3_CHECK_CPU(op, qkv);
  RopeAppendParams p = rope_append_params<float>(
      qkv, {table, {}, {}, {}, q_norm, k_norm},
      {q_heads, kv_heads, head_dim, v_head_dim, eps, norm_offset, interleaved});
  add_quant_cache(p, qkv, {k_words, k_scales}, {v_words, v_scales}, slots);
  std::vector<Tensor> kept{qkv, k_words, k_scales, v_words, v_scales, slots};
  for (const auto* t : {&table, &q_norm, &k_norm}) {
    if (t->has_value()) kept.push_back(**t);
  }
  launch(op, rope_append_cpu, p, {}, kept);
}

// NOLINTNEXTLINE: the parameters are the schema's
Tensor paged_attention_quant(const Tensor& qkv, const Tensor& k_words, const Tensor& k_scales,
                             const Tensor& v_words, const Tensor& v_scales,
                             const Tensor& page_table, const Tensor& seq_lens,
                             const Tensor& query_starts, int64_t q_heads, int64_t kv_heads,
                             int64_t head_dim, int64_t v_head_dim, double scale, int64_t window,
                             double softcap, bool causal) {
  const char* op = "paged_attention_quant";
  EXL3_CHECK_CPU(op, qkv);
  check_activation_dtype<float>(op, qkv, "qkv");
  AttentionParams p =
      attention_params<float>({qkv, page_table, seq_lens, query_starts},
                              {q_heads, kv_heads, head_dim, scale, window, softcap, causal});
  add_quant_cache(p, qkv, {k_words, k_scales}, {v_words, v_scales}, v_head_dim);
  Tensor out = allocate(qkv, {p.rows, q_heads * p.v_head_dim});
  p.out = data_mut<float>(out);
  launch(op, attention_cpu, p,
         {qkv, k_words, k_scales, v_words, v_scales, page_table, seq_lens, query_starts, out});
  return out;
}

// NOLINTNEXTLINE: the parameters are the schema's
Tensor paged_attention(const Tensor& qkv, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& page_table, const Tensor& seq_lens, const Tensor& query_starts,
                       int64_t q_heads, int64_t kv_heads, int64_t head_dim, double scale,
                       int64_t window, double softcap, bool causal) {
  const char* op = "paged_attention";
  EXL3_CHECK_CPU(op, qkv);
  check_activation_dtype<float>(op, qkv, "qkv");
  AttentionParams p =
      attention_params<float>({qkv, page_table, seq_lens, query_starts},
                              {q_heads, kv_heads, head_dim, scale, window, softcap, causal});
  add_cache(p, qkv, k_cache, v_cache);
  Tensor out = allocate(qkv, {p.rows, q_heads * p.v_head_dim});
  p.out = data_mut<float>(out);
  launch(op, attention_cpu, p, {qkv, k_cache, v_cache, page_table, seq_lens, query_starts, out});
  return out;
}

// NOLINTNEXTLINE: the parameters are the schema's
Tensor decode_attention(const Tensor& qkv, const std::optional<Tensor>& table,
                        const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots,
                        const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                        const Tensor& page_table, const Tensor& seq_lens,
                        const Tensor& query_starts, int64_t q_heads, int64_t kv_heads,
                        int64_t head_dim, double eps, double norm_offset, bool interleaved,
                        double scale, int64_t window, double softcap, bool causal, bool ahead) {
  EXL3_CHECK_DIM("decode_attention", v_cache, 4);
  rope_append_(qkv, table, k_cache, v_cache, slots, q_norm, k_norm, q_heads, kv_heads, head_dim,
               v_cache.size(3), eps, norm_offset, interleaved);
  return paged_attention(qkv, k_cache, v_cache, page_table, seq_lens, query_starts, q_heads,
                         kv_heads, head_dim, scale, window, softcap, causal);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) {
  m.impl("rope_table", TORCH_BOX(&rope_table));
  m.impl("rope_append_", TORCH_BOX(&rope_append_));
  m.impl("rope_append_quant_", TORCH_BOX(&rope_append_quant_));
  m.impl("paged_attention_quant", TORCH_BOX(&paged_attention_quant));
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
  m.impl("decode_attention", TORCH_BOX(&decode_attention));
}

}  // namespace exl3::bind
