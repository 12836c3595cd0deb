// Routes of exl3::linear on a GPU: choices between kernels, measured and set from outside. Where
// none is set, the built-in rules of the bindings decide.
#pragma once
#include <compare>
#include <vector>

#include "exl3/linear.h"

namespace exl3 {

// A further kernel is a further path: named here and in PATHS of exl3/ops/linear_route.py, offered
// by linear_routes (bind/cuda/linear_route.cpp), and obeyed by bind/cuda/linear.cpp, where a path
// that is set keeps all others from the problem.
enum class LinearPath : int {
  kBuiltIn = 0,
  kSmall = 1,    // the small-batch kernel (gemv.h), a launch for every 16 rows
  kDecoded = 2,  // decoded blocks of W' and a library's product
  kDirect = 3,   // decoded in registers for the tensor cores (gemm_direct.h)
  kEven = 4,     // a few rows, in equal shares for all multiprocessors (gemv_even.h)
};

struct LinearRoute {
  LinearPath path;
  // Of kSmall, as GemvConfig; of kDirect: DirectConfig::parts; of kEven: thread blocks a
  // multiprocessor. 0: built in.
  int cluster;
};

// What a route depends on, besides the device and the number of rows.
struct LinearProblem {
  int64_t k;
  int bits;
  int codebook;
  bool gated;
  std::vector<int64_t> n;  // padded
  auto operator<=>(const LinearProblem&) const = default;
};

// A route for first_rows..last_rows; takes the place of one with the same rows. Thread-safe.
void set_linear_route(int device, const LinearProblem& problem, int64_t first_rows,
                      int64_t last_rows, LinearRoute route);
void clear_linear_routes();
// Weights of unlike rates or codebooks have no route.
LinearRoute linear_route(int device, const LinearGroup& group);

}  // namespace exl3
