// Measured routes of exl3::linear: what can be chosen, and setting it.
#include "exl3/linear_route.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "bind/cuda/guard.h"
#include "exl3/gemm_direct.h"
#include "exl3/gemv.h"
#include "exl3/gemv_even.h"

namespace exl3::bind {
namespace {

using Ints = std::vector<int64_t>;

// k, bits, codebook, gated, then n of each weight.
LinearProblem problem_of(const char* op, const Ints& values) {
  EXL3_CHECK(op, values.size() >= 5 && values.size() <= 4 + kLinearGroup, "problem has ",
             values.size(), " numbers, expected k, bits, codebook, gated and 1..", kLinearGroup,
             " sizes");
  EXL3_CHECK(op, std::all_of(values.begin(), values.end(), [](int64_t v) { return v >= 0; }),
             "problem has a negative number");
  EXL3_CHECK(op, values[1] >= 1 && values[1] <= 8, "bits is ", values[1], ", expected 1..8");
  EXL3_CHECK(op, values[2] < kCodebooks, "codebook is ", values[2], ", expected 0, 1 or 2");
  return {values[0], static_cast<int>(values[1]), static_cast<int>(values[2]), values[3] != 0,
          Ints(values.begin() + 4, values.end())};
}

LinearCudaParams group_of(const LinearProblem& problem, int64_t m) {
  LinearCudaParams group{};
  group.m = m;
  group.in_features = group.k = problem.k;
  group.count = static_cast<int>(problem.n.size());
  group.activation = problem.gated ? 0 : -1;
  for (int i = 0; i < group.count; ++i) {
    group.w[i].n = group.w[i].out_features = problem.n[i];
    group.w[i].bits = problem.bits;
    group.w[i].codebook = static_cast<Codebook>(problem.codebook);
  }
  return group;
}

// Pairs of a path and a cluster size that can run m rows, the built-in rules (0, 0) first.
Ints linear_routes(int64_t device, int64_t m, const Ints& values) {
  constexpr int64_t kMostSmall = 64;      // rows for which the small-batch kernel is worth a try
  constexpr int64_t kFewestDecoded = 16;  // and decoding: it moves 16 bits a weight twice
  constexpr int64_t kFewestDirect = 3, kMostDirect = 256;
  const char* op = "linear_routes";
  const LinearCudaParams group = group_of(problem_of(op, values), m);
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  Ints found{0, 0};
  for (int cluster : {1, 2, 4, 8}) {
    if (m > kMostSmall || gemv_select(group, gemv_device(), cluster).rows == 0) continue;
    found.insert(found.end(), {static_cast<int64_t>(LinearPath::kSmall), cluster});
  }
  for (int parts = 1; parts <= kDirectCluster; ++parts) {
    if (m < kFewestDirect || m > kMostDirect) continue;
    if (direct_select(group, direct_device(), parts).rows == 0) continue;
    found.insert(found.end(), {static_cast<int64_t>(LinearPath::kDirect), parts});
  }
  for (int each : {1, 2, 4}) {
    if (m > kEvenMostRows || even_rows(group, even_device(), each) == 0) continue;
    found.insert(found.end(), {static_cast<int64_t>(LinearPath::kEven), each});
  }
  if (m >= kFewestDecoded) {
    found.insert(found.end(), {static_cast<int64_t>(LinearPath::kDecoded), 0});
  }
  return found;
}

void set_route(int64_t device, const Ints& values, int64_t first_rows, int64_t last_rows,
               int64_t path, int64_t cluster) {
  const char* op = "set_linear_route";
  EXL3_CHECK(op, first_rows >= 1 && first_rows <= last_rows, "rows are ", first_rows, " to ",
             last_rows);
  EXL3_CHECK(op, path >= 0 && path <= static_cast<int64_t>(LinearPath::kEven), "path is ", path);
  EXL3_CHECK(op, cluster >= 0 && cluster <= 8, "cluster is ", cluster, ", expected 0..8");
  set_linear_route(static_cast<int>(device), problem_of(op, values), first_rows, last_rows,
                   {static_cast<LinearPath>(path), static_cast<int>(cluster)});
}

// Of the driver, as 1000 * major + 10 * minor.
int64_t cuda_driver() {
  int version = 0;
  EXL3_CHECK("cuda_driver", cudaDriverGetVersion(&version) == cudaSuccess, "no driver answers");
  return version;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("linear_routes", TORCH_BOX(&linear_routes));
  m.impl("set_linear_route", TORCH_BOX(&set_route));
  m.impl("clear_linear_routes", TORCH_BOX(&clear_linear_routes));
  m.impl("cuda_driver", TORCH_BOX(&cuda_driver));
}

}  // namespace exl3::bind
