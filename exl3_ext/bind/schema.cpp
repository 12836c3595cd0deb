// The schema of every op, once. Kernels register under these names for CPU (bind/cpu) and CUDA.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(exl3, m) {
  // Runtime of the CPU library
  m.def("graph_begin() -> ()");
  m.def("graph_end(bool keep) -> int");
  m.def("graph_replay(int graph) -> ()");
  m.def("graph_size(int graph) -> int");
  m.def("graph_free(int graph) -> ()");
  m.def("configure_cpu(int threads, int isa_cap) -> ()");
  m.def("cpu_isa(bool detected) -> int");
  m.def("cpu_threads() -> int");

  // Encoder
  m.def("trellis_encode(Tensor tiles, Tensor codebook, int bits) -> (Tensor, Tensor)");

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
      "linear(Tensor x, Tensor[] planes, Tensor[] suh, Tensor[] svh, Tensor?[] bias, "
      "int[] codebooks, int[] out_features, Tensor? norm_weight, float norm_eps, "
      "float norm_offset, int activation, Tensor? residual) -> Tensor");
  m.def(
      "linear_add_(Tensor(a!) residual, Tensor x, Tensor[] planes, Tensor[] suh, Tensor[] svh, "
      "Tensor?[] bias, int[] codebooks, int[] out_features, Tensor? norm_weight, float norm_eps, "
      "float norm_offset, int activation) -> ()");
}
