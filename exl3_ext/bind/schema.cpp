// The schema of every op, once. Kernels register under these names for CPU (bind/cpu) and CUDA.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(exl3, m) {
  // Runtime of the CPU library
  m.def("graph_begin(Tensor? arena) -> ()");
  m.def("graph_measure(Tensor[] results) -> int");
  m.def("graph_end(bool keep) -> int");
  m.def("graph_replay(int graph) -> ()");
  m.def("graph_size(int graph) -> int");
  m.def("graph_free(int graph) -> ()");
  m.def("configure_cpu(int threads, int isa_cap) -> ()");
  m.def("cpu_isa(bool detected) -> int");
  m.def("cpu_threads() -> int");

  // Encoder
  m.def(
      "trellis_encode(Tensor tiles, Tensor codebook, Tensor table, float weight_limit, "
      "float weight_scale, int gain, int bits, bool check) -> (Tensor, Tensor)");

  // Rows, rotary embedding, attention
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset) -> Tensor");
  m.def("gated_activation(Tensor gate_up, int kind) -> Tensor");
  m.def("embedding(Tensor ids, Tensor table, float scale) -> Tensor");
  m.def("argmax(Tensor logits, int valid) -> Tensor");
  m.def(
      "sample(Tensor(a!) logits, int valid, Tensor plans, Tensor(b!) edits, Tensor masks) -> "
      "Tensor");
  m.def("rope_table(Tensor positions, Tensor inv_freq, float scale) -> Tensor");
  m.def(
      "rope_append_(Tensor(a!) qkv, Tensor? table, Tensor(b!)? k_cache, Tensor(c!)? v_cache, "
      "Tensor? slots, Tensor? q_norm, Tensor? k_norm, int q_heads, int kv_heads, int head_dim, "
      "int v_head_dim, float eps, float norm_offset, bool interleaved) -> ()");
  m.def(
      "rope_append_quant_(Tensor(a!) qkv, Tensor? table, Tensor(b!) k_words, Tensor(c!) k_scales, "
      "Tensor(d!) v_words, Tensor(e!) v_scales, Tensor slots, Tensor? q_norm, Tensor? k_norm, "
      "int q_heads, int kv_heads, int head_dim, int v_head_dim, float eps, float norm_offset, "
      "bool interleaved) -> ()");
  m.def(
      "paged_attention_quant(Tensor qkv, Tensor k_words, Tensor k_scales, Tensor v_words, "
      "Tensor v_scales, Tensor page_table, Tensor seq_lens, Tensor query_starts, int q_heads, "
      "int kv_heads, int head_dim, int v_head_dim, float scale, int window, float softcap, "
      "bool causal) -> Tensor");
  m.def(
      "paged_attention(Tensor qkv, Tensor k_cache, Tensor v_cache, Tensor page_table, "
      "Tensor seq_lens, Tensor query_starts, int q_heads, int kv_heads, int head_dim, "
      "float scale, int window, float softcap, bool causal) -> Tensor");
  m.def(
      "decode_attention(Tensor(a!) qkv, Tensor? table, Tensor(b!) k_cache, Tensor(c!) v_cache, "
      "Tensor slots, Tensor? q_norm, Tensor? k_norm, Tensor page_table, Tensor seq_lens, "
      "Tensor query_starts, int q_heads, int kv_heads, int head_dim, float eps, "
      "float norm_offset, bool interleaved, float scale, int window, float softcap, bool causal, "
      "bool ahead) -> Tensor");

  // Codec
  m.def("hadamard_128(Tensor x, Tensor? pre_scale, Tensor? post_scale) -> Tensor");
  m.def("trellis_pack(Tensor states, int bits) -> Tensor");
  m.def("trellis_unpack(Tensor trellis) -> Tensor");
  m.def("trellis_decode(Tensor trellis, int codebook) -> Tensor");
  m.def("trellis_prepare(Tensor trellis) -> Tensor");
  m.def("trellis_restore(Tensor planes) -> Tensor");
  m.def("gemm_large(Tensor x, Tensor planes, int codebook) -> Tensor");

  // Linear
  m.def(
      "low_rank_add_(Tensor(a!) y, Tensor x, Tensor[] a, Tensor[] b, int[] starts, int[] owners, "
      "Tensor mask) -> ()");
  m.def("advise_huge_pages(Tensor x) -> ()");
  m.def("linear_select(int isa, int codebook, int bits, int m) -> (int, int)");
  m.def("linear_routes(int device, int m, int[] problem) -> int[]");
  m.def(
      "set_linear_route(int device, int[] problem, int first_rows, int last_rows, int path, "
      "int cluster) -> ()");
  m.def("clear_linear_routes() -> ()");
  m.def("cuda_driver() -> int");
  m.def("configure_cuda(int capability_cap) -> ()");
  m.def("cuda_capability(int device) -> int");
  m.def(
      "linear(Tensor x, Tensor[] planes, Tensor[] suh, Tensor[] svh, Tensor?[] bias, "
      "int[] codebooks, int[] out_features, Tensor? norm_weight, float norm_eps, "
      "float norm_offset, int activation, Tensor? residual) -> Tensor");
  m.def(
      "linear_add_(Tensor(a!) residual, Tensor x, Tensor[] planes, Tensor[] suh, Tensor[] svh, "
      "Tensor?[] bias, int[] codebooks, int[] out_features, Tensor? norm_weight, float norm_eps, "
      "float norm_offset, int activation) -> ()");
}
