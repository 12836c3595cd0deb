// Bindings of rotary embedding and attention.
#include <torch/csrc/stable/library.h>

#include <map>
#include <mutex>
#include <utility>

#include "bind/attention_params.h"
#include "bind/cuda/guard.h"

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

// Zeroed counters of one device and stream, made once and never freed: a captured step keeps their
// address. Every launch leaves them zero. Steps captured on one stream must not run at once.
unsigned* counters_for(const Tensor& near, const CudaLaunch& launch) {
  static std::mutex mutex;
  static auto& all = *new std::map<std::pair<int, cudaStream_t>, Tensor>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_pair(static_cast<int>(near.get_device_index()), launch.stream());
  auto found = all.find(key);
  if (found == all.end()) {
    Tensor made = torch::stable::new_zeros(near, {kCounters}, ScalarType::Int);
    found = all.emplace(key, made).first;
  }
  return data_mut<unsigned>(found->second);
}

// NOLINTNEXTLINE: the parameters are the schema's
Tensor paged_attention(const Tensor& qkv, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& page_table, const Tensor& seq_lens, const Tensor& query_starts,
                       int64_t q_heads, int64_t kv_heads, int64_t head_dim, double scale,
                       int64_t window, double softcap, bool causal) {
  const char* op = "paged_attention";
  EXL3_CHECK_CUDA(op, qkv);
  const bool half = qkv.scalar_type() == ScalarType::Half;
  if (!half) check_activation_dtype<float>(op, qkv, "qkv");
  AttentionCudaParams p{};
  p.a = attention_params<void>({qkv, page_table, seq_lens, query_starts},
                               {q_heads, kv_heads, head_dim, scale, window, softcap, causal});
  add_cache(p.a, qkv, k_cache, v_cache);
  p.dtype = half ? DType::kFloat16 : DType::kFloat32;
  Tensor out = torch::stable::new_empty(qkv, {p.a.rows, q_heads * p.a.v_head_dim});
  p.a.out = data_mut<void>(out);
  const CudaLaunch launch(qkv);
  plan_attention_cuda(p);
  std::optional<Tensor> partials;
  if (p.max_chunks > 1) {
    EXL3_CHECK(op, p.tiles * kv_heads <= kCounters, "too many tiles to split");
    const int64_t tile_floats = p.tile_rows * (p.a.v_head_dim + int64_t{2});
    partials = torch::stable::new_empty(qkv, {p.tiles * kv_heads * p.max_chunks * tile_floats},
                                        ScalarType::Float);
    p.partials = data_mut<float>(*partials);
    p.counters = counters_for(qkv, launch);
  }
  launch.run(op, attention_cuda, p);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) {
  m.impl("rope_table", TORCH_BOX(&rope_table));
  m.impl("rope_append_", TORCH_BOX(&rope_append_));
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
}

}  // namespace exl3::bind
