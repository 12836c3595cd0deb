// Bindings of rotary embedding and attention.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "bind/attention_params.h"
#include "bind/cuda/zeroed.h"
#include "exl3/decode_attention.h"

namespace exl3::bind {
namespace {

constexpr int64_t kCounters = 1 << 16;

Tensor rope_table(const Tensor& positions, const Tensor& inv_freq, double scale) {
  EXL3_CHECK_CUDA("rope_table", inv_freq);
  RopeTableParams p = rope_table_params(positions, inv_freq, scale);
  Tensor table = torch::stable::new_empty(inv_freq, {p.rows, 2 * p.half});
  p.table = data_mut<float>(table);
  CudaLaunch(inv_freq).run("rope_table", rope_table_cuda, p);
  return table;
}

template <class T>
void rope_append_of(const Tensor& qkv, const RopeAppendTensors& t, const RopeAppendOptions& o) {
  const RopeAppend<T> p = rope_append_params<T>(qkv, t, o);
  CudaLaunch(qkv).run("rope_append_", rope_append_cuda<T>, p);
}

// NOLINTNEXTLINE: the parameters are the schema's
void rope_append_(const Tensor& qkv, const std::optional<Tensor>& table,
                  const std::optional<Tensor>& k_cache, const std::optional<Tensor>& v_cache,
                  const std::optional<Tensor>& slots, const std::optional<Tensor>& q_norm,
                  const std::optional<Tensor>& k_norm, int64_t q_heads, int64_t kv_heads,
                  int64_t head_dim, int64_t v_head_dim, double eps, double norm_offset,
                  bool interleaved) {
  EXL3_CHECK_CUDA("rope_append_", qkv);
  const RopeAppendTensors t{table, k_cache, v_cache, slots, q_norm, k_norm};
  const RopeAppendOptions o{q_heads, kv_heads, head_dim, v_head_dim, eps, norm_offset, interleaved};
  if (qkv.scalar_type() == ScalarType::Half)
    rope_append_of<half_bits>(qkv, t, o);
  else
    rope_append_of<float>(qkv, t, o);
}

template <class T>
void rope_append_quant_of(const Tensor& qkv, const RopeAppendTensors& t, const RopeAppendOptions& o,
                          const QuantTensors& k, const QuantTensors& v, const Tensor& slots) {
  RopeAppend<T> p = rope_append_params<T>(qkv, t, o);
  add_quant_cache(p, qkv, k, v, slots);
  CudaLaunch(qkv).run("rope_append_quant_", rope_append_cuda<T>, p);
}

// NOLINTNEXTLINE: the parameters are the schema's
void rope_append_quant_(const Tensor& qkv, const std::optional<Tensor>& table,
                        const Tensor& k_words, const Tensor& k_scales, const Tensor& v_words,
                        const Tensor& v_scales, const Tensor& slots,
                        const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                        int64_t q_heads, int64_t kv_heads, int64_t head_dim, int64_t v_head_dim,
                        double eps, double norm_offset, bool interleaved) {
  EXL3_CHECK_CUDA("rope_append_quant_", qkv);
  const std::optional<Tensor> none;
  const RopeAppendTensors t{table, none, none, none, q_norm, k_norm};
  const RopeAppendOptions o{q_heads, kv_heads, head_dim, v_head_dim, eps, norm_offset, interleaved};
  const QuantTensors k{k_words, k_scales}, v{v_words, v_scales};
  if (qkv.scalar_type() == ScalarType::Half)
    rope_append_quant_of<half_bits>(qkv, t, o, k, v, slots);
  else
    rope_append_quant_of<float>(qkv, t, o, k, v, slots);
}

// Runs attention on what `p.a` says, all but the output.
Tensor attend(const char* op, const Tensor& qkv, AttentionCudaParams& p) {
  Tensor out = torch::stable::new_empty(qkv, {p.a.rows, int64_t{p.a.q_heads} * p.a.v_head_dim});
  p.a.out = data_mut<void>(out);
  const CudaLaunch launch(qkv);
  plan_attention_cuda(p);
  std::optional<Tensor> partials;
  if (p.max_chunks > 1) {
    const int64_t tiles = p.tiles * p.a.kv_heads;
    EXL3_CHECK(op, tiles <= kCounters, "too many tiles to split");
    const int64_t tile_floats = p.tile_rows * (p.a.v_head_dim + int64_t{2});
    partials =
        torch::stable::new_empty(qkv, {tiles * p.max_chunks * tile_floats}, ScalarType::Float);
    p.partials = data_mut<float>(*partials);
    p.counters = zeroed_words(qkv, launch, kCounters);
  }
  launch.run(op, attention_cuda, p);
  return out;
}

AttentionCudaParams sequences_of(const char* op, const AttentionTensors& t,
                                 const AttentionOptions& o) {
  EXL3_CHECK_CUDA(op, t.qkv);
  const bool half = t.qkv.scalar_type() == ScalarType::Half;
  if (!half) check_activation_dtype<float>(op, t.qkv, "qkv");
  AttentionCudaParams p{};
  p.a = attention_params<void>(t, o);
  p.dtype = half ? DType::kFloat16 : DType::kFloat32;
  return p;
}

// NOLINTNEXTLINE: the parameters are the schema's
Tensor paged_attention(const Tensor& qkv, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& page_table, const Tensor& seq_lens, const Tensor& query_starts,
                       int64_t q_heads, int64_t kv_heads, int64_t head_dim, double scale,
                       int64_t window, double softcap, bool causal) {
  const char* op = "paged_attention";
  AttentionCudaParams p =
      sequences_of(op, {qkv, page_table, seq_lens, query_starts},
                   {q_heads, kv_heads, head_dim, scale, window, softcap, causal});
  add_cache(p.a, qkv, k_cache, v_cache);
  return attend(op, qkv, p);
}

// NOLINTNEXTLINE: the parameters are the schema's
Tensor paged_attention_quant(const Tensor& qkv, const Tensor& k_words, const Tensor& k_scales,
                             const Tensor& v_words, const Tensor& v_scales,
                             const Tensor& page_table, const Tensor& seq_lens,
                             const Tensor& query_starts, int64_t q_heads, int64_t kv_heads,
                             int64_t head_dim, int64_t v_head_dim, double scale, int64_t window,
                             double softcap, bool causal) {
  const char* op = "paged_attention_quant";
  AttentionCudaParams p =
      sequences_of(op, {qkv, page_table, seq_lens, query_starts},
                   {q_heads, kv_heads, head_dim, scale, window, softcap, causal});
  add_quant_cache(p.a, qkv, {k_words, k_scales}, {v_words, v_scales}, v_head_dim);
  return attend(op, qkv, p);
}

// The same problem for the one-launch kernel, all but the output.
template <class T>
DecodeAttentionParams decode_params(const AttentionCudaParams& attention, const RopeAppend<T>& rows,
                                    bool ahead) {
  const Attention<void>& a = attention.a;
  DecodeAttentionParams p{};
  p.qkv = rows.qkv;
  p.dtype = attention.dtype;
  p.table = rows.table;
  p.k_cache = rows.k_cache;
  p.v_cache = rows.v_cache;
  p.slots = rows.slots;
  p.page_table = a.page_table;
  p.seq_lens = a.seq_lens;
  p.q_norm = rows.q_norm;
  p.k_norm = rows.k_norm;
  p.stride = rows.stride;
  p.sequences = a.sequences;
  p.pages = a.pages;
  p.max_pages = a.max_pages;
  p.queries = a.sequences ? static_cast<int>(std::min<int64_t>(a.rows / a.sequences, 1 << 30)) : 0;
  p.q_heads = a.q_heads;
  p.kv_heads = a.kv_heads;
  p.head_dim = a.head_dim;
  p.v_head_dim = a.v_head_dim;
  p.rot = rows.rot;
  p.eps = rows.eps;
  p.norm_offset = rows.norm_offset;
  p.interleaved = rows.interleaved;
  p.scale = a.scale;
  p.softcap = a.softcap;
  p.window = a.window;
  p.causal = a.causal;
  p.ahead = ahead;
  return p;
}

template <class T>
Tensor decode_of(const Tensor& qkv, const RopeAppendTensors& t, const RopeAppendOptions& o,
                 AttentionCudaParams& attention, bool ahead) {
  const char* op = "decode_attention";
  const RopeAppend<T> rows = rope_append_params<T>(qkv, t, o);
  DecodeAttentionParams p = decode_params(attention, rows, ahead);
  const CudaLaunch launch(qkv);
  p.cluster = plan_decode_attention(p);
  if (!p.cluster) {
    launch.run(op, rope_append_cuda<T>, rows);
    return attend(op, qkv, attention);
  }
  Tensor out = torch::stable::new_empty(qkv, {rows.rows, int64_t{p.q_heads} * p.v_head_dim});
  p.out = data_mut<void>(out);
  launch.run(op, decode_attention_cuda, p);
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
  const char* op = "decode_attention";
  AttentionCudaParams p =
      sequences_of(op, {qkv, page_table, seq_lens, query_starts},
                   {q_heads, kv_heads, head_dim, scale, window, softcap, causal});
  add_cache(p.a, qkv, k_cache, v_cache);
  EXL3_CHECK(op, p.a.sequences == 0 || p.a.rows % p.a.sequences == 0, "qkv.size(0) is ", p.a.rows,
             ", expected a multiple of page_table.size(0), ", p.a.sequences);
  const std::optional<Tensor> k = k_cache, v = v_cache, own_slots = slots;
  const RopeAppendTensors t{table, k, v, own_slots, q_norm, k_norm};
  const RopeAppendOptions o{q_heads, kv_heads,    head_dim,   p.a.v_head_dim,
                            eps,     norm_offset, interleaved};
  return p.dtype == DType::kFloat16 ? decode_of<half_bits>(qkv, t, o, p, ahead)
                                    : decode_of<float>(qkv, t, o, p, ahead);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) {
  m.impl("rope_table", TORCH_BOX(&rope_table));
  m.impl("rope_append_", TORCH_BOX(&rope_append_));
  m.impl("rope_append_quant_", TORCH_BOX(&rope_append_quant_));
  m.impl("paged_attention_quant", TORCH_BOX(&paged_attention_quant));
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
  m.impl("decode_attention", TORCH_BOX(&decode_attention));
}

}  // namespace exl3::bind
