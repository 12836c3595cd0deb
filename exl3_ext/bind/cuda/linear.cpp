#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bind/cuda/zeroed.h"
#include "bind/linear_params.h"
#include "exl3/gemm_direct.h"
#include "exl3/gemv.h"
#include "exl3/gemv_even.h"
#include "exl3/linear_cuda.h"
#include "exl3/linear_route.h"
#include "exl3/trellis.h"

namespace exl3::bind {
namespace {

constexpr int64_t kDecodeLimit = int64_t{1} << 27;  // weights decoded at once: 256 MiB

Rows rows_of(const char* op, const Tensor& t, const char* name) {
  EXL3_CHECK(op, t.is_cuda(), name, " is not on a CUDA device");
  EXL3_CHECK(op, is_float(t), name, " has dtype ", torch::headeronly::toString(t.scalar_type()),
             ", expected Half, BFloat16 or Float");
  return {t.data_ptr(), t.stride(0), dtype_of(t)};
}

Rows from_column(const Rows& rows, int64_t column) {
  if (rows.data == nullptr) return rows;
  const int64_t size = rows.type == DType::kFloat32 ? 4 : 2;
  return {static_cast<char*>(rows.data) + column * size, rows.stride, rows.type};
}

LinearCudaParams fill(const char* op, const Tensor& x, const WeightLists& lists,
                      const NormArgument& norm, int64_t activation) {
  const Rows rows = rows_of(op, x, "x");
  LinearCudaParams p{};
  fill_group(op, x, lists, norm, activation, &p);
  p.x = rows;
  return p;
}

// Products by decoded blocks of W', for any number of rows.
class DenseLinear {
 public:
  DenseLinear(const char* op, const CudaLaunch& launch, const Tensor& x, const LinearCudaParams& p)
      : op_(op), launch_(launch), x_(x), p_(p) {}

  void run() const {
    if (p_.activation >= 0 && p_.w[0].n <= block_columns()) return run_gated();
    if (p_.activation >= 0) return run_gated_in_parts();
    // All inputs first: y may be x.
    const std::vector<Inner> inners = input_sides(0, p_.count);
    int64_t column = 0;
    for (int i = 0; i < p_.count; ++i) {
      run_one(p_.w[i], inners[i], from_column(p_.residual, column), from_column(p_.y, column));
      column += p_.w[i].out_features;
    }
  }

 private:
  struct Inner {
    Tensor values;     // float16 (m, k), after the input transform
    Tensor row_scale;  // float32 (m,), one for all
  };

  int64_t block_columns() const {
    return std::max<int64_t>(kHadamardDim, kDecodeLimit / p_.k / kHadamardDim * kHadamardDim);
  }

  // Of weights first..first+count.
  std::vector<Inner> input_sides(int first, int count) const {
    const Tensor row_scale = torch::stable::new_empty(x_, {p_.m}, ScalarType::Float);
    std::vector<Inner> inners;
    InputSideParams in{};
    for (int i = 0; i < count; ++i) {
      inners.push_back({torch::stable::new_empty(x_, {p_.m, p_.k}, ScalarType::Half), row_scale});
      in.suh[i] = p_.w[first + i].suh;
      in.inner[i] = data_mut<half_bits>(inners[i].values);
    }
    in.count = count;
    in.x = p_.x;
    in.norm_weight = p_.norm_weight;
    in.norm_eps = p_.norm_eps;
    in.norm_offset = p_.norm_offset;
    in.row_scale = data_mut<float>(row_scale);
    in.m = p_.m;
    in.in_features = p_.in_features;
    in.k = p_.k;
    launch_.run(op_, input_side_cuda, in);
    return inners;
  }

  // float16 (m, n): inner @ W' for columns first..first+n.
  Tensor multiply(const LinearWeightRef& w, const Tensor& values, int64_t first, int64_t n) const {
    const Tensor decoded = torch::stable::new_empty(x_, {p_.k, n}, ScalarType::Half);
    PlanesDecodeParams d{};
    d.words = reinterpret_cast<const uint32_t*>(w.planes) + first * p_.k * w.bits / 32;
    d.w = data_mut<half_bits>(decoded);
    d.k = p_.k;
    d.n = n;
    d.bits = w.bits;
    d.codebook = w.codebook;
    launch_.run(op_, planes_decode_cuda, d);
    return torch::stable::matmul(values, decoded);
  }

  OutputSideParams output_side(int64_t n, int64_t out) const {
    OutputSideParams o{};
    o.m = p_.m;
    o.n = n;
    o.out = out;
    o.activation = -1;
    return o;
  }

  void run_one(const LinearWeightRef& w, const Inner& inner, const Rows& residual,
               const Rows& y) const {
    for (int64_t first = 0; first < w.n; first += block_columns()) {
      const int64_t n = std::min(block_columns(), w.n - first);
      const Tensor values = multiply(w, inner.values, first, n);
      OutputSideParams o = output_side(n, std::min(n, w.out_features - first));
      o.gate = {data<half_bits>(values), w.svh + first, w.bias ? w.bias + first : nullptr};
      o.gate_scale = data<float>(inner.row_scale);
      o.residual = from_column(residual, first);
      o.y = from_column(y, first);
      launch_.run(op_, output_side_cuda, o);
    }
  }

  void run_gated() const {
    const LinearWeightRef &gate = p_.w[0], &up = p_.w[1];
    const std::vector<Inner> inners = input_sides(0, 2);
    const Inner &gate_in = inners[0], &up_in = inners[1];
    const Tensor gate_out = multiply(gate, gate_in.values, 0, gate.n);
    const Tensor up_out = multiply(up, up_in.values, 0, up.n);
    OutputSideParams o = output_side(gate.n, gate.out_features);
    o.gate = {data<half_bits>(gate_out), gate.svh, gate.bias};
    o.up = {data<half_bits>(up_out), up.svh, up.bias};
    o.gate_scale = data<float>(gate_in.row_scale);
    o.up_scale = data<float>(up_in.row_scale);
    o.residual = p_.residual;
    o.y = p_.y;
    o.activation = p_.activation;
    launch_.run(op_, output_side_cuda, o);
  }

  void run_gated_in_parts() const {
    const int64_t out = p_.w[0].out_features;
    const Tensor both = torch::stable::new_empty(x_, {p_.m, 2 * out}, ScalarType::Float);
    const Rows rows{both.data_ptr(), 2 * out, DType::kFloat32};
    for (int i = 0; i < 2; ++i) {
      run_one(p_.w[i], input_sides(i, 1)[0], {}, from_column(rows, i * out));
    }
    launch_.run(op_, gate_cuda,
                GateParams{data<float>(both), p_.residual, p_.y, p_.m, out, p_.activation});
  }

  const char* op_;
  const CudaLaunch& launch_;
  const Tensor& x_;
  const LinearCudaParams& p_;
};

// Rows up to which launches straight from the trellis, 6.6 ms for 16 rows of an 8B model on an
// H200, beat decoding W': about 12 ms by the bytes that it moves, for any few rows.
constexpr int64_t kMostSmallRows = 32;

// Rows for which the direct product is built in, on GPUs that have it. Linear part of an 8B model
// on an H200: 3.6 ms for 16 rows and 6.9 ms for 128 (8 rows of the small-batch kernel 4.3 ms).
constexpr int64_t kFewestDirectRows = 9, kMostDirectRows = 128;

// Whether a path may run: it is the route's, or none is set and the built-in rules allow it.
bool may_run(const LinearRoute& route, LinearPath path, bool built_in) {
  return route.path == LinearPath::kBuiltIn ? built_in : route.path == path;
}

// The direct product for the whole group; false if it has no instance for it.
bool run_direct(const char* op, const CudaLaunch& launch, const Tensor& x,
                const LinearCudaParams& p, const LinearRoute& route) {
  const bool built_in = p.m >= kFewestDirectRows && p.m <= kMostDirectRows;
  if (!may_run(route, LinearPath::kDirect, built_in)) return false;
  for (int i = 0; i < p.count; ++i) {
    if (reinterpret_cast<uintptr_t>(p.w[i].planes) % 16 != 0) return false;  // bulk copies
  }
  DirectParams direct{};
  static_cast<LinearCudaParams&>(direct) = p;
  direct.config = direct_select(p, direct_device(), route.cluster);
  if (direct.config.rows == 0) return false;
  const Tensor workspace =
      torch::stable::new_empty(x, {direct_workspace_bytes(p, direct.config)}, ScalarType::Byte);
  direct.workspace = data_mut<unsigned char>(workspace);
  launch.run(op, direct_cuda, direct);
  return true;
}

// Rows first..first + count of a problem.
LinearCudaParams rows_from(const LinearCudaParams& p, int64_t first, int64_t count) {
  LinearCudaParams part = p;
  part.m = count;
  for (Rows* rows : {&part.x, &part.residual, &part.y}) {
    *rows = from_column(*rows, first * rows->stride);
  }
  return part;
}

// Inputs of several rows for the even product.
Tensor even_inputs(const char* op, const CudaLaunch& launch, const Tensor& x,
                   const LinearCudaParams& p, const EvenParams& even) {
  GemvParams gemv{};
  static_cast<LinearCudaParams&>(gemv) = p;
  gemv.config.rows = even.rows;
  gemv.config.fragments = even.fragments;
  const Tensor workspace =
      torch::stable::new_empty(x, {gemv_input_bytes(p, gemv.config)}, ScalarType::Byte);
  gemv.workspace = data_mut<unsigned char>(workspace);
  launch.run(op, gemv_input_cuda, gemv);
  return workspace;
}

// The even product for the whole group; false if it has no instance for it.
bool run_even(const char* op, const CudaLaunch& launch, const Tensor& x, const LinearCudaParams& p,
              const LinearRoute& route) {
  if (p.m > kEvenMostRows || !may_run(route, LinearPath::kEven, true)) return false;
  const int rows = even_rows(p, even_device(), route.cluster);
  for (int64_t first = 0; rows != 0 && first < p.m; first += rows) {
    const LinearCudaParams part = rows_from(p, first, std::min<int64_t>(rows, p.m - first));
    EvenParams even;
    const bool planned = even_plan(part, even_device(), route.cluster, &even);
    EXL3_CHECK(op, planned, "rows ", first, ".. have no plan");
    std::optional<Tensor> workspace;
    if (even.fragments > 0) {
      workspace = even_inputs(op, launch, x, part, even);
      even.workspace = data<unsigned char>(*workspace);
    }
    const int64_t words = int64_t{even.blocks} * even.rows * kEvenExchange;
    even.exchange = zeroed_words(x, launch, words);
    launch.run(op, even_cuda, even);
  }
  return rows != 0;
}

// The small-batch kernel for the whole group; false if it has no instance for it.
bool run_small(const char* op, const CudaLaunch& launch, const Tensor& x, const LinearCudaParams& p,
               const LinearRoute& route) {
  if (!may_run(route, LinearPath::kSmall, p.m <= kMostSmallRows)) return false;
  GemvParams gemv{};
  static_cast<LinearCudaParams&>(gemv) = p;
  gemv.config = gemv_select(p, gemv_device(), route.cluster);
  if (gemv.config.rows == 0) return false;
  const Tensor workspace =
      torch::stable::new_empty(x, {gemv_workspace_bytes(p, gemv.config)}, ScalarType::Byte);
  gemv.workspace = data_mut<unsigned char>(workspace);
  launch.run(op, gemv_cuda, gemv);
  return true;
}

// Straight from the trellis, by some kernel. The even product is the built-in choice only where the
// small-batch kernel has no room: small devices, large k.
bool run_fused(const char* op, const CudaLaunch& launch, const Tensor& x,
               const LinearCudaParams& p) {
  const LinearRoute route = linear_route(x.get_device_index(), p);
  return run_direct(op, launch, x, p, route) || run_small(op, launch, x, p, route) ||
         run_even(op, launch, x, p, route);
}

// One weight of a group, as a problem of its own.
LinearCudaParams single(const LinearCudaParams& p, int i, const Rows& residual, const Rows& y) {
  LinearCudaParams one = p;
  one.w[0] = p.w[i];
  one.count = 1;
  one.activation = -1;
  one.residual = residual;
  one.y = y;
  return one;
}

// A group of unlike bit rates or codebooks, weight by weight.
bool run_mixed(const char* op, const CudaLaunch& launch, const Tensor& x,
               const LinearCudaParams& p) {
  if (p.m > (direct_device().warpgroups ? kMostDirectRows : kMostSmallRows)) return false;
  if (linear_route(x.get_device_index(), p).path == LinearPath::kDecoded) return false;
  if (p.activation >= 0) {
    const int64_t out = p.w[0].out_features;
    const Tensor both = torch::stable::new_empty(x, {p.m, 2 * out}, ScalarType::Float);
    const Rows rows{both.data_ptr(), 2 * out, DType::kFloat32};
    for (int i = 0; i < 2; ++i) {
      if (!run_fused(op, launch, x, single(p, i, {}, from_column(rows, i * out)))) return false;
    }
    launch.run(op, gate_cuda,
               GateParams{data<float>(both), p.residual, p.y, p.m, out, p.activation});
    return true;
  }
  int64_t column = 0;
  for (int i = 0; i < p.count; ++i) {
    const LinearCudaParams one =
        single(p, i, from_column(p.residual, column), from_column(p.y, column));
    if (!run_fused(op, launch, x, one)) DenseLinear(op, launch, x, one).run();
    column += p.w[i].out_features;
  }
  return true;
}

struct Bytes {
  uintptr_t begin, end;
};
Bytes extent(const Rows& rows, int64_t m, int64_t columns) {
  const int64_t size = rows.type == DType::kFloat32 ? 4 : 2;
  const auto begin = reinterpret_cast<uintptr_t>(rows.data);
  return {begin, begin + static_cast<uintptr_t>(((m - 1) * rows.stride + columns) * size)};
}

void run(const char* op, const Tensor& x, LinearCudaParams p) {
  if (p.m == 0) return;
  const CudaLaunch launch(x);
  // Thread blocks write y while others read x.
  const Bytes from = extent(p.x, p.m, p.in_features), to = extent(p.y, p.m, columns_of(p));
  std::optional<Tensor> copy;
  if (from.begin < to.end && to.begin < from.end) {
    copy = torch::stable::clone(x);
    p.x = rows_of(op, *copy, "x");
  }
  if (run_fused(op, launch, x, p) || run_mixed(op, launch, x, p)) return;
  DenseLinear(op, launch, x, p).run();
}

Tensor linear(const Tensor& x, Tensors planes, Tensors suh, Tensors svh, OptionalTensors bias,
              Ints codebooks, Ints out_features, const std::optional<Tensor>& norm_weight,
              double norm_eps, double norm_offset, int64_t activation,
              const std::optional<Tensor>& residual) {
  const char* op = "linear";
  LinearCudaParams p = fill(op, x, {planes, suh, svh, bias, codebooks, out_features},
                            {norm_weight, norm_eps, norm_offset}, activation);
  const Tensor y = torch::stable::new_empty(x, {p.m, columns_of(p)});
  p.y = rows_of(op, y, "y");
  if (residual.has_value()) {
    EXL3_CHECK_SAME_DEVICE(op, *residual, x);
    check_residual(op, *residual, p);
    p.residual = rows_of(op, *residual, "residual");
  }
  run(op, x, p);
  return y;
}

void linear_add_(const Tensor& residual, const Tensor& x, Tensors planes, Tensors suh, Tensors svh,
                 OptionalTensors bias, Ints codebooks, Ints out_features,
                 const std::optional<Tensor>& norm_weight, double norm_eps, double norm_offset,
                 int64_t activation) {
  const char* op = "linear_add_";
  LinearCudaParams p = fill(op, x, {planes, suh, svh, bias, codebooks, out_features},
                            {norm_weight, norm_eps, norm_offset}, activation);
  EXL3_CHECK_SAME_DEVICE(op, residual, x);
  check_residual(op, residual, p);
  p.y = p.residual = rows_of(op, residual, "residual");
  run(op, x, p);
}

Tensor gemm_large(const Tensor& x, const Tensor& planes, int64_t codebook) {
  const char* op = "gemm_large";
  check_matrix(op, x, "x");
  EXL3_CHECK_DTYPE(op, x, Half);
  EXL3_CHECK_PARAMETER(op, planes, Short, x);
  EXL3_CHECK_DIM(op, planes, 3);
  EXL3_CHECK_SIZE(op, x, 1, planes.size(1) * kTileDim);
  EXL3_CHECK(op, codebook >= 0 && codebook < kCodebooks, "codebook is ", codebook,
             ", expected 0, 1 or 2");
  const int64_t words = planes.size(2);
  EXL3_CHECK(op, words % 16 == 0 && words >= 16 && words <= 128, "planes.size(2) is ", words,
             ", expected 16 * bits, bits 1..8");
  PlanesDecodeParams d{};
  d.words = data<uint32_t>(planes);
  d.k = x.size(1);
  d.n = planes.size(0) * kTileDim;
  EXL3_CHECK(op, d.k % kHadamardDim == 0, "k is ", d.k, ", expected a multiple of 128");
  EXL3_CHECK(op, d.n % kHadamardDim == 0, "n is ", d.n, ", expected a multiple of 128");
  d.bits = static_cast<int>(words / 16);
  d.codebook = static_cast<Codebook>(codebook);
  const CudaLaunch launch(x);
  const Tensor w = torch::stable::new_empty(x, {d.k, d.n}, ScalarType::Half);
  d.w = data_mut<half_bits>(w);
  launch.run(op, planes_decode_cuda, d);
  return torch::stable::matmul(x, w);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_add_", TORCH_BOX(&linear_add_));
  m.impl("gemm_large", TORCH_BOX(&gemm_large));
}

}  // namespace exl3::bind
