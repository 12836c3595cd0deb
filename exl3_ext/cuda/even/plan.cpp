// Problem -> plan of the even product: pure arithmetic, no device calls.
#include <algorithm>
#include <climits>

#include "cuda/even/shape.h"
#include "exl3/codebook.h"

namespace exl3 {
namespace {

using namespace cuda;

int divided_up(int a, int b) { return (a + b - 1) / b; }

// umulhi(n, reciprocal(d)) is n / d for all n < 2^32 / d; d is at least 2.
uint32_t reciprocal(int d) {
  return static_cast<uint32_t>(((uint64_t{1} << 32) + static_cast<uint64_t>(d) - 1) /
                               static_cast<uint64_t>(d));
}

// Four values at every fourth column of m rows lie in one word of their size.
bool aligned(const Rows& rows, int64_t m) {
  const uintptr_t size = rows.type == DType::kFloat32 ? 16 : 8;
  return reinterpret_cast<uintptr_t>(rows.data) % size == 0 && (m == 1 || rows.stride % 4 == 0);
}
bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

bool fits(const LinearCudaParams& p) {
  if (p.m < 1 || p.m > kGemvMaxRows || p.k < kHadamardDim) return false;
  if (!aligned(p.y, p.m) || !aligned(p.residual, p.m)) return false;
  int64_t outputs = 0;
  for (int i = 0; i < p.count; ++i) {
    const LinearWeightRef& w = p.w[i];
    if (w.codebook != p.w[0].codebook || w.bits != p.w[0].bits) return false;
    if (w.out_features != w.n) return false;
    if (!aligned(w.planes) || !aligned(w.suh) || !aligned(w.svh) || !aligned(w.bias)) return false;
    outputs += w.n;
  }
  return outputs <= int64_t{1} << 24 && p.k <= int64_t{1} << 20;  // turns fit an int
}

// Whether one row's inputs can be made by the thread blocks themselves.
bool makes_inputs(const LinearCudaParams& p) {
  return p.m == 1 && p.in_features == p.k && aligned(p.x, 1) && aligned(p.norm_weight);
}

void take_weights(const LinearCudaParams& p, EvenParams* plan) {
  int groups = 0, column = 0;
  for (int i = 0; i < kLinearGroup; ++i) {
    plan->w[i].group_end = INT_MAX;
    if (i >= p.count) continue;
    const LinearWeightRef& w = p.w[i];
    groups += static_cast<int>(w.n / 64);
    const int end = i == p.count - 1 ? INT_MAX : groups;
    plan->w[i] = {
        reinterpret_cast<const unsigned char*>(w.planes), w.suh, w.svh, w.bias, end, column};
    if (p.activation < 0) column += static_cast<int>(w.n);
  }
  plan->all = groups * plan->turns;
}

// Shared memory of `each` thread blocks a multiprocessor; false if there is not so much.
bool take_shared(const LinearCudaParams& p, const EvenDevice& device, int each, bool own_inputs,
                 EvenParams* plan) {
  // A thread block's turns touch at most these groups, weights and jobs.
  const int size = plan->run * kEvenWarps, of_block = even_turns_of_block(plan->bits);
  const int groups = divided_up(size, plan->turns) + 1;
  const int weights = std::min(p.count, p.activation >= 0 ? 2 : groups);
  const int jobs = weights * std::min(plan->k_blocks, divided_up(size, of_block) + 1);
  plan->sums_bytes = (kEvenWarps + groups) * plan->rows * kGemvSumPitch * 4;
  int ring = kEvenWarps * even_turn_bytes(plan->bits), constants = 0;
  if (own_inputs) {
    ring *= even_depth(plan->bits);
    plan->fragments = 0;
    plan->input_bytes = jobs * kEvenJobBytes;
    constants = jobs * of_block * 4;
  } else {
    const int depth = even_rows_depth(plan->bits);
    const bool integer = plan->codebook == Codebook::kMul1;
    ring *= depth;
    plan->fragments = gemv_fragments(plan->codebook, plan->rows);
    plan->input_bytes =
        kEvenWarps * (depth + 1) * even_rows_bytes(integer, plan->fragments, plan->bits);
  }
  plan->shared_bytes = ring + plan->input_bytes + plan->sums_bytes + constants;
  if (each * (plan->shared_bytes + kEvenReservedBytes) > device.shared_bytes_all) return false;
  if (device.pairs && each == 1 && own_inputs && p.norm_weight) {
    plan->shared_bytes = std::max(plan->shared_bytes, kNormSharedBytes);
  }
  return plan->shared_bytes <= device.shared_bytes;
}

bool plan_with(const LinearCudaParams& p, const EvenDevice& device, int each, bool own_inputs,
               EvenParams* plan) {
  *plan = {};
  plan->bits = p.w[0].bits;
  plan->codebook = p.w[0].codebook;
  const bool mcg = plan->codebook == Codebook::kMcg;
  plan->multiplier = mcg ? kMcgMul : k3instMul;
  plan->increment = mcg ? 0 : k3instAdd;
  plan->activation = p.activation;
  plan->groups_log = p.activation >= 0 ? 2 : 1;
  plan->k_blocks = static_cast<int>(p.k / kHadamardDim);
  plan->turns = plan->k_blocks * even_turns_of_block(plan->bits);
  plan->rows = static_cast<int>(p.m);
  plan->weights = p.count;
  take_weights(p, plan);
  if (int64_t{plan->all} * plan->turns >= int64_t{1} << 32) return false;  // see reciprocal
  plan->blocks = each * device.multiprocessors;
  plan->run = std::max(2, divided_up(plan->all, plan->blocks * kEvenWarps));
  plan->per_run = reciprocal(plan->run);
  plan->per_block = reciprocal(plan->run * kEvenWarps);
  plan->per_turns = reciprocal(plan->turns);
  plan->x = p.x, plan->y = p.y, plan->residual = p.residual;
  plan->norm_weight = p.norm_weight;
  plan->norm_eps = p.norm_eps, plan->norm_offset = p.norm_offset;
  return take_shared(p, device, each, own_inputs, plan);
}

}  // namespace

bool even_plan(const LinearCudaParams& p, const EvenDevice& device, int each, EvenParams* plan) {
  if (device.shared_bytes == 0 || !fits(p)) return false;
  // Two fill each other's waits, where no thread block of another launch does. One row without a
  // launch before it comes first.
  for (const bool own_inputs : {true, false}) {
    if (own_inputs && !makes_inputs(p)) continue;
    for (int count = each == 0 && !device.pairs ? 2 : std::max(each, 1); count >= 1; --count) {
      if (each != 0 && count != each) break;
      if (plan_with(p, device, count, own_inputs, plan)) return true;
    }
  }
  return false;
}

int even_rows(const LinearCudaParams& problem, const EvenDevice& device, int each) {
  LinearCudaParams part = problem;
  EvenParams plan;
  for (int rows = kGemvMaxRows; rows >= 1; rows /= 2) {
    part.m = std::min<int64_t>(rows, problem.m);
    if (part.m < problem.m && (problem.y.stride % 4 != 0 || problem.residual.stride % 4 != 0)) {
      return 0;  // rows of later launches would not be aligned
    }
    if (even_plan(part, device, each, &plan)) return static_cast<int>(part.m);
  }
  return 0;
}

}  // namespace exl3
