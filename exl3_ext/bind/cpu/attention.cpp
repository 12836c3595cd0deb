// Bindings of rotary embedding and attention.
#include "exl3/attention.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>

#include "bind/cpu/launch.h"
#include "exl3/rope.h"

namespace exl3::bind {
namespace {

// float32 (m, >= width) with rows that may lie apart; returns the distance between them.
int64_t checked_qkv(const char* op, const Tensor& qkv, int64_t width) {
  EXL3_CHECK_CPU(op, qkv);
  EXL3_CHECK_DTYPE(op, qkv, Float);
  EXL3_CHECK_DIM(op, qkv, 2);
  EXL3_CHECK(op, qkv.size(1) >= width, "qkv.size(1) is ", qkv.size(1), ", expected at least ",
             width);
  EXL3_CHECK(op, qkv.stride(1) == 1, "qkv.stride(1) is ", qkv.stride(1), ", expected 1");
  EXL3_CHECK(op, qkv.size(0) <= 1 || qkv.stride(0) >= width, "rows of qkv overlap");
  return qkv.size(0) > 1 ? qkv.stride(0) : qkv.size(1);
}

void check_cache(const char* op, const Tensor& cache, int64_t kv_heads, int64_t dim) {
  EXL3_CHECK_ARG(op, cache, Half);
  EXL3_CHECK_DIM(op, cache, 4);
  EXL3_CHECK_SIZE(op, cache, 1, kPageSize);
  EXL3_CHECK_SIZE(op, cache, 2, kv_heads);
  EXL3_CHECK_SIZE(op, cache, 3, dim);
}

Tensor rope_table(const Tensor& positions, const Tensor& inv_freq, double scale) {
  const char* op = "rope_table";
  EXL3_CHECK_ARG(op, positions, Int);
  EXL3_CHECK_DIM(op, positions, 1);
  EXL3_CHECK_ARG(op, inv_freq, Float);
  EXL3_CHECK_DIM(op, inv_freq, 1);
  RopeTableParams p{};
  p.rows = positions.size(0);
  p.half = inv_freq.size(0);
  const int64_t sizes[] = {p.rows, 2 * p.half};
  Tensor table = torch::stable::new_empty(inv_freq, {sizes, 2});
  p.positions = data<int32_t>(positions);
  p.inv_freq = data<float>(inv_freq);
  p.table = data_mut<float>(table);
  p.scale = static_cast<float>(scale);
  launch(op, rope_table_cpu, p, {positions, inv_freq, table});
  return table;
}

void check_heads(const char* op, int64_t q_heads, int64_t kv_heads, int64_t head_dim) {
  EXL3_CHECK(op, q_heads >= 1 && kv_heads >= 1 && q_heads % kv_heads == 0, "q_heads is ", q_heads,
             ", expected a multiple of kv_heads, ", kv_heads);
  EXL3_CHECK(op, head_dim >= 1 && head_dim <= 65536, "head_dim is ", head_dim);
}

void add_cache(RopeAppendParams& p, std::vector<Tensor>& kept, const Tensor& k_cache,
               const Tensor& v_cache, const Tensor& slots) {
  const char* op = "rope_append_";
  check_cache(op, k_cache, p.kv_heads, p.head_dim);
  check_cache(op, v_cache, p.kv_heads, p.v_head_dim);
  EXL3_CHECK_SIZE(op, v_cache, 0, k_cache.size(0));
  EXL3_CHECK_ARG(op, slots, Long);
  EXL3_CHECK_DIM(op, slots, 1);
  EXL3_CHECK_SIZE(op, slots, 0, p.rows);
  p.k_cache = data_mut<half_bits>(k_cache);
  p.v_cache = data_mut<half_bits>(v_cache);
  p.slots = data<int64_t>(slots);
  p.total_slots = k_cache.size(0) * kPageSize;
  kept.insert(kept.end(), {k_cache, v_cache, slots});
}

const float* head_norm(std::vector<Tensor>& kept, const std::optional<Tensor>& weight,
                       int64_t head_dim) {
  if (!weight) return nullptr;
  EXL3_CHECK_ARG("rope_append_", *weight, Float);
  EXL3_CHECK_DIM("rope_append_", *weight, 1);
  EXL3_CHECK_SIZE("rope_append_", *weight, 0, head_dim);
  kept.push_back(*weight);
  return data<float>(*weight);
}

// NOLINTNEXTLINE: the parameters are the schema's
void rope_append_(const Tensor& qkv, const std::optional<Tensor>& table,
                  const std::optional<Tensor>& k_cache, const std::optional<Tensor>& v_cache,
                  const std::optional<Tensor>& slots, const std::optional<Tensor>& q_norm,
                  const std::optional<Tensor>& k_norm, int64_t q_heads, int64_t kv_heads,
                  int64_t head_dim, int64_t v_head_dim, double eps, double norm_offset,
                  bool interleaved) {
  const char* op = "rope_append_";
  EXL3_CHECK(op, q_heads >= 1 && kv_heads >= 1, "q_heads and kv_heads must be positive");
  check_heads(op, kv_heads, kv_heads, head_dim);
  check_heads(op, kv_heads, kv_heads, v_head_dim);
  RopeAppendParams p{};
  p.q_heads = static_cast<int>(q_heads);
  p.kv_heads = static_cast<int>(kv_heads);
  p.head_dim = static_cast<int>(head_dim);
  p.v_head_dim = static_cast<int>(v_head_dim);
  p.stride = checked_qkv(op, qkv, (q_heads + kv_heads) * head_dim + kv_heads * v_head_dim);
  p.rows = qkv.size(0);
  p.qkv = data_mut<float>(qkv);
  std::vector<Tensor> kept{qkv};
  if (table) {
    EXL3_CHECK_ARG(op, *table, Float);
    EXL3_CHECK_DIM(op, *table, 2);
    EXL3_CHECK_SIZE(op, *table, 0, p.rows);
    EXL3_CHECK(op, table->size(1) % 2 == 0 && table->size(1) <= head_dim, "table.size(1) is ",
               table->size(1), ", expected an even number up to ", head_dim);
    p.table = data<float>(*table);
    p.rot = static_cast<int>(table->size(1));
    kept.push_back(*table);
  }
  const bool cached = k_cache.has_value();
  EXL3_CHECK(op, v_cache.has_value() == cached && slots.has_value() == cached,
             "k_cache, v_cache and slots go together: all or none");
  if (cached) add_cache(p, kept, *k_cache, *v_cache, *slots);
  p.q_norm = head_norm(kept, q_norm, head_dim);
  p.k_norm = head_norm(kept, k_norm, head_dim);
  p.eps = static_cast<float>(eps);
  p.norm_offset = static_cast<float>(norm_offset);
  p.interleaved = interleaved;
  launch(op, rope_append_cpu, p, {}, kept);
}

void add_sequences(AttentionParams& p, const Tensor& page_table, const Tensor& seq_lens,
                   const Tensor& query_starts) {
  const char* op = "paged_attention";
  EXL3_CHECK_ARG(op, page_table, Int);
  EXL3_CHECK_DIM(op, page_table, 2);
  EXL3_CHECK_ARG(op, seq_lens, Int);
  EXL3_CHECK_DIM(op, seq_lens, 1);
  EXL3_CHECK_SIZE(op, seq_lens, 0, page_table.size(0));
  EXL3_CHECK_ARG(op, query_starts, Int);
  EXL3_CHECK_DIM(op, query_starts, 1);
  EXL3_CHECK_SIZE(op, query_starts, 0, page_table.size(0) + 1);
  p.sequences = page_table.size(0);
  p.max_pages = page_table.size(1);
  p.page_table = data<int32_t>(page_table);
  p.seq_lens = data<int32_t>(seq_lens);
  p.query_starts = data<int32_t>(query_starts);
}

// NOLINTNEXTLINE: the parameters are the schema's
Tensor paged_attention(const Tensor& qkv, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& page_table, const Tensor& seq_lens, const Tensor& query_starts,
                       int64_t q_heads, int64_t kv_heads, int64_t head_dim, double scale,
                       int64_t window, double softcap, bool causal) {
  const char* op = "paged_attention";
  check_heads(op, q_heads, kv_heads, head_dim);
  AttentionParams p{};
  p.q_stride = checked_qkv(op, qkv, q_heads * head_dim);
  p.rows = qkv.size(0);
  check_cache(op, k_cache, kv_heads, head_dim);
  EXL3_CHECK_DIM(op, v_cache, 4);
  check_heads(op, q_heads, kv_heads, v_cache.size(3));
  check_cache(op, v_cache, kv_heads, v_cache.size(3));
  EXL3_CHECK_SIZE(op, v_cache, 0, k_cache.size(0));
  add_sequences(p, page_table, seq_lens, query_starts);
  EXL3_CHECK(op, window >= 0 && window <= INT32_MAX, "window is ", window, ", expected 0 or more");
  EXL3_CHECK(op, softcap >= 0, "softcap is ", softcap, ", expected 0 or more");
  p.q_heads = static_cast<int>(q_heads);
  p.kv_heads = static_cast<int>(kv_heads);
  p.head_dim = static_cast<int>(head_dim);
  p.v_head_dim = static_cast<int>(v_cache.size(3));
  const int64_t sizes[] = {p.rows, q_heads * p.v_head_dim};
  Tensor out = torch::stable::new_empty(qkv, {sizes, 2});
  p.q = data<float>(qkv);
  p.k_cache = data<half_bits>(k_cache);
  p.v_cache = data<half_bits>(v_cache);
  p.out = data_mut<float>(out);
  p.pages = k_cache.size(0);
  p.scale = static_cast<float>(scale);
  p.softcap = static_cast<float>(softcap);
  p.window = static_cast<int>(window);
  p.causal = causal;
  launch(op, attention_cpu, p, {qkv, k_cache, v_cache, page_table, seq_lens, query_starts, out});
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) {
  m.impl("rope_table", TORCH_BOX(&rope_table));
  m.impl("rope_append_", TORCH_BOX(&rope_append_));
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
}

}  // namespace exl3::bind
