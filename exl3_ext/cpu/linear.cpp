// The fused linear layer on CPUs: one fork-join.
//
// Tasks: first the prologue (norm, suh, transform, quantise) in pieces of whole
// 128-blocks, then runs of 16-column strips, one after another in memory. Tasks start in order, so
// a strip task may wait for the prologue pieces: they are done or running. Whoever finishes the
// last strip of a group of 128 outputs runs its epilogue (transform, svh, bias, activation,
// residual). A column is summed by one task, block after block, and a block's sum is an exact
// integer: results depend neither on threads nor on the other rows.
#include "exl3/linear.h"

#include <sched.h>

#include <atomic>

#include "cpu/linear_plan.h"
#include "cpu/table.h"
#include "cpu/threads.h"

namespace exl3 {
namespace {

constexpr int64_t kGroupStrips = kHadamardDim / kTileDim;

std::atomic<int32_t>& counter(const LinearPlan& plan, int64_t i) {
  return reinterpret_cast<std::atomic<int32_t>*>(plan.counters)[i];
}

// The pieces waited for run on other threads already, and are short.
void wait_for(const std::atomic<int32_t>& value, int32_t wanted) {
  for (int spins = 0; value.load(std::memory_order_acquire) != wanted; ++spins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (spins > 2000) sched_yield();
  }
}

struct Job {
  const LinearParams& p;
  const LinearPlan& plan;
  const KernelTable& kernels;
  int64_t units, pieces;  // prologue: 128-blocks of all rows and weights, and tasks for them
  int64_t strips, runs;   // strips of all weights, and tasks for them
};

// Prologue piece: units in the order (weight, row, block).
void run_prologue(const Job& job, int64_t piece) {
  const LinearParams& p = job.p;
  const int64_t blocks = p.k / kHadamardDim;
  int64_t at = job.units * piece / job.pieces;
  const int64_t end = job.units * (piece + 1) / job.pieces;
  while (at < end) {
    const int64_t row = at / blocks, block = at % blocks;
    const int64_t count = end - at < blocks - block ? end - at : blocks - block;
    const int weight = static_cast<int>(row / p.m);
    job.kernels.linear_prologue(p, job.plan.w[weight], weight, row % p.m, block, block + count);
    at += count;
  }
  counter(job.plan, 0).fetch_add(1, std::memory_order_release);
}

struct Place {
  int weight;
  int64_t block, group;
};

// 128-column blocks in the order that tasks visit them: gate and up take turns, so that a pair is
// finished by the same or a neighbouring task.
Place place_of(const LinearParams& p, int64_t index) {
  if (p.activation >= 0) return {static_cast<int>(index & 1), index >> 1, index >> 1};
  int weight = 0;
  int64_t block = index;
  while (block >= p.w[weight].n / kHadamardDim) block -= p.w[weight++].n / kHadamardDim;
  return {weight, block, index};
}

void (*inner_product(const KernelTable& table, LinearKernel kernel))(const LinearStrips&) {
  if (kernel == LinearKernel::kBytes) return table.linear_bytes;
  if (kernel == LinearKernel::kTiles) return table.linear_tiles;
  if (kernel == LinearKernel::kMany) return table.linear_many;
  return table.linear_words;
}

void run_strips(const Job& job, int64_t run) {
  const LinearParams& p = job.p;
  wait_for(counter(job.plan, 0), static_cast<int32_t>(job.pieces));
  int64_t at = job.strips * run / job.runs;
  const int64_t end = job.strips * (run + 1) / job.runs;
  const int64_t whole = p.activation >= 0 ? 2 * kGroupStrips : kGroupStrips;
  while (at < end) {
    const Place place = place_of(p, at / kGroupStrips);
    const int64_t first = at % kGroupStrips;
    const int64_t count = end - at < kGroupStrips - first ? end - at : kGroupStrips - first;
    const LinearWeightRef& w = p.w[place.weight];
    const LinearWeightPlan& wp = job.plan.w[place.weight];
    const int64_t strip = place.block * kGroupStrips + first;
    const LinearStrips s{w.planes, wp.q,  wp.meta,       wp.inner, p.m,        p.k,
                         w.n,      strip, strip + count, w.bits,   w.codebook, wp.choice.planes};
    inner_product(job.kernels, wp.choice.kernel)(s);
    const int32_t done = static_cast<int32_t>(count);
    const int32_t before =
        counter(job.plan, 1 + place.group).fetch_add(done, std::memory_order_acq_rel);
    if (before + done == whole) {
      job.kernels.linear_epilogue(p, job.plan, place.weight, place.block);
    }
    at += count;
  }
}

void run_task(void* context, int64_t task, int) {
  const Job& job = *static_cast<const Job*>(context);
  if (task < job.pieces)
    run_prologue(job, task);
  else
    run_strips(job, task - job.pieces);
}

void run_part(const LinearParams& p, const LinearPlan& plan, const KernelTable& table) {
  for (int64_t i = 0; i <= plan.groups; ++i) counter(plan, i).store(0, std::memory_order_relaxed);
  const int64_t threads = num_threads();
  int64_t strips = 0;
  for (int i = 0; i < p.count; ++i) strips += p.w[i].n / kTileDim;
  const int64_t units = p.count * p.m * (p.k / kHadamardDim);
  const int64_t pieces = units < threads ? units : threads;
  const int64_t runs = strips < 4 * threads ? strips : 4 * threads;
  Job job{p, plan, table, units, pieces, strips, runs};
  parallel_run(pieces + runs, run_task, &job);
}

}  // namespace

Status linear_cpu(const LinearParams& p) {
  if (p.count < 1 || p.count > kLinearGroup || p.k % kHadamardDim != 0) return Status::kBadArgument;
  for (int64_t row = 0; row < p.m; row += kLinearRows) {
    LinearParams part = p;
    part.m = p.m - row < kLinearRows ? p.m - row : kLinearRows;
    part.x += row * p.x_stride;
    part.y += row * p.y_stride;
    if (p.residual) part.residual += row * p.residual_stride;
    const LinearPlan plan = linear_plan(part, active_isa());
    if (plan.bytes > p.workspace_bytes) return Status::kBadArgument;
    run_part(part, plan, kernels());
  }
  return Status::kOk;
}

}  // namespace exl3
