// Argument checks of rotary embedding and attention, the same on every device. T: the type of
// activations.
#pragma once
#include "bind/rows_params.h"
#include "exl3/attention.h"
#include "exl3/rope.h"

namespace exl3::bind {

// (m, >= width) with rows that may lie apart; returns the distance between them.
inline int64_t checked_qkv(const char* op, const Tensor& qkv, int64_t width) {
  EXL3_CHECK_DIM(op, qkv, 2);
  EXL3_CHECK(op, qkv.size(1) >= width, "qkv.size(1) is ", qkv.size(1), ", expected at least ",
             width);
  EXL3_CHECK(op, qkv.stride(1) == 1, "qkv.stride(1) is ", qkv.stride(1), ", expected 1");
  EXL3_CHECK(op, qkv.size(0) <= 1 || qkv.stride(0) >= width, "rows of qkv overlap");
  return qkv.size(0) > 1 ? qkv.stride(0) : qkv.size(1);
}

inline void check_cache(const char* op, const Tensor& cache, const Tensor& qkv, int64_t kv_heads,
                        int64_t dim) {
  EXL3_CHECK_BESIDE(op, cache, qkv, Half);
  EXL3_CHECK_DIM(op, cache, 4);
  EXL3_CHECK_SIZE(op, cache, 1, kPageSize);
  EXL3_CHECK_SIZE(op, cache, 2, kv_heads);
  EXL3_CHECK_SIZE(op, cache, 3, dim);
}

// Words and scales of a quantised K or V cache, as in the schema.
struct QuantTensors {
  const Tensor &words, &scales;
};

// Checks one and returns its bits per value.
inline int checked_quant_bits(const char* op, const QuantTensors& t, const Tensor& qkv,
                              int64_t kv_heads, int64_t dim) {
  const Tensor &words = t.words, &scales = t.scales;
  const int64_t blocks = quant_blocks(static_cast<int>(dim));
  EXL3_CHECK_BESIDE(op, words, qkv, Int);
  EXL3_CHECK_BESIDE(op, scales, qkv, Half);
  EXL3_CHECK_DIM(op, words, 4);
  EXL3_CHECK_DIM(op, scales, 4);
  EXL3_CHECK_SIZE(op, words, 1, kPageSize);
  EXL3_CHECK_SIZE(op, words, 2, kv_heads);
  for (int i = 0; i < 3; ++i) EXL3_CHECK_SIZE(op, scales, i, words.size(i));
  EXL3_CHECK_SIZE(op, scales, 3, blocks);
  const int64_t bits = words.size(3) / blocks;
  EXL3_CHECK(op, words.size(3) == bits * blocks && bits >= kQuantMinBits && bits <= kQuantMaxBits,
             "words.size(3) is ", words.size(3), ", expected ", blocks, " times 2..8");
  return static_cast<int>(bits);
}

inline QuantRows quant_rows(const char* op, const QuantTensors& t, const Tensor& qkv,
                            int64_t kv_heads, int64_t dim) {
  const int bits = checked_quant_bits(op, t, qkv, kv_heads, dim);
  return {data<uint32_t>(t.words), data<half_bits>(t.scales), bits};
}

inline QuantRowsOut quant_rows_out(const char* op, const QuantTensors& t, const Tensor& qkv,
                                   int64_t kv_heads, int64_t dim) {
  const int bits = checked_quant_bits(op, t, qkv, kv_heads, dim);
  return {data_mut<uint32_t>(t.words), data_mut<half_bits>(t.scales), bits};
}

inline void check_heads(const char* op, int64_t q_heads, int64_t kv_heads, int64_t head_dim) {
  EXL3_CHECK(op, q_heads >= 1 && kv_heads >= 1 && q_heads % kv_heads == 0, "q_heads is ", q_heads,
             ", expected a multiple of kv_heads, ", kv_heads);
  EXL3_CHECK(op, head_dim >= 1 && head_dim <= 65536, "head_dim is ", head_dim);
}

inline RopeTableParams rope_table_params(const Tensor& positions, const Tensor& inv_freq,
                                         double scale) {
  const char* op = "rope_table";
  EXL3_CHECK_BESIDE(op, positions, inv_freq, Int);
  EXL3_CHECK_DIM(op, positions, 1);
  EXL3_CHECK_BESIDE(op, inv_freq, inv_freq, Float);
  EXL3_CHECK_DIM(op, inv_freq, 1);
  RopeTableParams p{};
  p.rows = positions.size(0);
  p.half = inv_freq.size(0);
  p.positions = data<int32_t>(positions);
  p.inv_freq = data<float>(inv_freq);
  p.scale = static_cast<float>(scale);
  return p;
}

// What rope_append_ takes besides qkv, as in the schema.
struct RopeAppendTensors {
  const std::optional<Tensor>&table, &k_cache, &v_cache, &slots, &q_norm, &k_norm;
};

struct RopeAppendOptions {
  int64_t q_heads, kv_heads, head_dim, v_head_dim;
  double eps, norm_offset;
  bool interleaved;
};

inline const float* head_norm(const Tensor& qkv, const std::optional<Tensor>& weight,
                              int64_t head_dim) {
  if (!weight) return nullptr;
  EXL3_CHECK_BESIDE("rope_append_", *weight, qkv, Float);
  EXL3_CHECK_DIM("rope_append_", *weight, 1);
  EXL3_CHECK_SIZE("rope_append_", *weight, 0, head_dim);
  return data<float>(*weight);
}

template <class T>
void add_slots(RopeAppend<T>& p, const char* op, const Tensor& qkv, const Tensor& slots,
               int64_t pages) {
  EXL3_CHECK_BESIDE(op, slots, qkv, Long);
  EXL3_CHECK_DIM(op, slots, 1);
  EXL3_CHECK_SIZE(op, slots, 0, p.rows);
  p.slots = data<int64_t>(slots);
  p.total_slots = pages * kPageSize;
}

template <class T>
void add_cache(RopeAppend<T>& p, const Tensor& qkv, const RopeAppendTensors& t) {
  const char* op = "rope_append_";
  const Tensor &k_cache = *t.k_cache, &v_cache = *t.v_cache;
  check_cache(op, k_cache, qkv, p.kv_heads, p.head_dim);
  check_cache(op, v_cache, qkv, p.kv_heads, p.v_head_dim);
  EXL3_CHECK_SIZE(op, v_cache, 0, k_cache.size(0));
  p.k_cache = data_mut<half_bits>(k_cache);
  p.v_cache = data_mut<half_bits>(v_cache);
  add_slots(p, op, qkv, *t.slots, k_cache.size(0));
}

template <class T>
void add_quant_cache(RopeAppend<T>& p, const Tensor& qkv, const QuantTensors& k,
                     const QuantTensors& v, const Tensor& slots) {
  const char* op = "rope_append_quant_";
  p.k_quant = quant_rows_out(op, k, qkv, p.kv_heads, p.head_dim);
  p.v_quant = quant_rows_out(op, v, qkv, p.kv_heads, p.v_head_dim);
  EXL3_CHECK_SIZE(op, v.words, 0, k.words.size(0));
  add_slots(p, op, qkv, slots, k.words.size(0));
}

template <class T>
RopeAppend<T> rope_append_params(const Tensor& qkv, const RopeAppendTensors& t,
                                 const RopeAppendOptions& o) {
  const char* op = "rope_append_";
  check_activation_dtype<T>(op, qkv, "qkv");
  EXL3_CHECK(op, o.q_heads >= 1 && o.kv_heads >= 1, "q_heads and kv_heads must be positive");
  check_heads(op, o.kv_heads, o.kv_heads, o.head_dim);
  check_heads(op, o.kv_heads, o.kv_heads, o.v_head_dim);
  RopeAppend<T> p{};
  p.q_heads = static_cast<int>(o.q_heads);
  p.kv_heads = static_cast<int>(o.kv_heads);
  p.head_dim = static_cast<int>(o.head_dim);
  p.v_head_dim = static_cast<int>(o.v_head_dim);
  p.stride =
      checked_qkv(op, qkv, (o.q_heads + o.kv_heads) * o.head_dim + o.kv_heads * o.v_head_dim);
  p.rows = qkv.size(0);
  p.qkv = data_mut<T>(qkv);
  if (t.table) {
    const Tensor& table = *t.table;
    EXL3_CHECK_BESIDE(op, table, qkv, Float);
    EXL3_CHECK_DIM(op, table, 2);
    EXL3_CHECK_SIZE(op, table, 0, p.rows);
    EXL3_CHECK(op, table.size(1) % 2 == 0 && table.size(1) <= o.head_dim, "table.size(1) is ",
               table.size(1), ", expected an even number up to ", o.head_dim);
    p.table = data<float>(table);
    p.rot = static_cast<int>(table.size(1));
  }
  const bool cached = t.k_cache.has_value();
  EXL3_CHECK(op, t.v_cache.has_value() == cached && t.slots.has_value() == cached,
             "k_cache, v_cache and slots go together: all or none");
  if (cached) add_cache(p, qkv, t);
  p.q_norm = head_norm(qkv, t.q_norm, o.head_dim);
  p.k_norm = head_norm(qkv, t.k_norm, o.head_dim);
  p.eps = static_cast<float>(o.eps);
  p.norm_offset = static_cast<float>(o.norm_offset);
  p.interleaved = o.interleaved;
  return p;
}

struct AttentionTensors {
  const Tensor &qkv, &page_table, &seq_lens, &query_starts;
};

struct AttentionOptions {
  int64_t q_heads, kv_heads, head_dim;
  double scale;
  int64_t window;
  double softcap;
  bool causal;
};

template <class T>
void add_sequences(Attention<T>& p, const AttentionTensors& t) {
  const char* op = "paged_attention";
  const Tensor &page_table = t.page_table, &seq_lens = t.seq_lens, &query_starts = t.query_starts;
  EXL3_CHECK_BESIDE(op, page_table, t.qkv, Int);
  EXL3_CHECK_DIM(op, page_table, 2);
  EXL3_CHECK_BESIDE(op, seq_lens, t.qkv, Int);
  EXL3_CHECK_DIM(op, seq_lens, 1);
  EXL3_CHECK_SIZE(op, seq_lens, 0, page_table.size(0));
  EXL3_CHECK_BESIDE(op, query_starts, t.qkv, Int);
  EXL3_CHECK_DIM(op, query_starts, 1);
  EXL3_CHECK_SIZE(op, query_starts, 0, page_table.size(0) + 1);
  p.sequences = page_table.size(0);
  p.max_pages = page_table.size(1);
  p.page_table = data<int32_t>(page_table);
  p.seq_lens = data<int32_t>(seq_lens);
  p.query_starts = data<int32_t>(query_starts);
}

// All but the cache and the output; the dtype of qkv is the caller's to check.
template <class T>
Attention<T> attention_params(const AttentionTensors& t, const AttentionOptions& o) {
  const char* op = "paged_attention";
  check_heads(op, o.q_heads, o.kv_heads, o.head_dim);
  Attention<T> p{};
  p.q_stride = checked_qkv(op, t.qkv, o.q_heads * o.head_dim);
  p.rows = t.qkv.size(0);
  add_sequences(p, t);
  EXL3_CHECK(op, o.window >= 0 && o.window <= INT32_MAX, "window is ", o.window,
             ", expected 0 or more");
  EXL3_CHECK(op, o.softcap >= 0, "softcap is ", o.softcap, ", expected 0 or more");
  p.q_heads = static_cast<int>(o.q_heads);
  p.kv_heads = static_cast<int>(o.kv_heads);
  p.head_dim = static_cast<int>(o.head_dim);
  p.q = data<T>(t.qkv);
  p.scale = static_cast<float>(o.scale);
  p.softcap = static_cast<float>(o.softcap);
  p.window = static_cast<int>(o.window);
  p.causal = o.causal;
  return p;
}

template <class T>
void add_cache(Attention<T>& p, const Tensor& qkv, const Tensor& k_cache, const Tensor& v_cache) {
  const char* op = "paged_attention";
  check_cache(op, k_cache, qkv, p.kv_heads, p.head_dim);
  EXL3_CHECK_DIM(op, v_cache, 4);
  check_heads(op, p.q_heads, p.kv_heads, v_cache.size(3));
  check_cache(op, v_cache, qkv, p.kv_heads, v_cache.size(3));
  EXL3_CHECK_SIZE(op, v_cache, 0, k_cache.size(0));
  p.v_head_dim = static_cast<int>(v_cache.size(3));
  p.k_cache = data<half_bits>(k_cache);
  p.v_cache = data<half_bits>(v_cache);
  p.pages = k_cache.size(0);
}

template <class T>
void add_quant_cache(Attention<T>& p, const Tensor& qkv, const QuantTensors& k,
                     const QuantTensors& v, int64_t v_head_dim) {
  const char* op = "paged_attention_quant";
  check_heads(op, p.q_heads, p.kv_heads, v_head_dim);
  p.v_head_dim = static_cast<int>(v_head_dim);
  p.k_quant = quant_rows(op, k, qkv, p.kv_heads, p.head_dim);
  p.v_quant = quant_rows(op, v, qkv, p.kv_heads, v_head_dim);
  EXL3_CHECK_SIZE(op, v.words, 0, k.words.size(0));
  p.pages = k.words.size(0);
}

}  // namespace exl3::bind
