// One pool of threads for all CPU kernels. Fork-join: the caller takes part, tasks are handed out
// one by one, workers spin for a short while after a job (a decode step is hundreds of small jobs)
// and then sleep.
#pragma once
#include <cstdint>

namespace exl3 {

using TaskFn = void (*)(void* context, int64_t task, int thread);

int num_threads();            // threads that take part, the caller included
void set_num_threads(int n);  // 0: one per core in this process's affinity mask

// Runs fn(context, task, thread) for task in [0, tasks); thread in [0, num_threads()). Returns when
// all are done. Tasks are claimed in increasing order, so one may wait for an earlier one. A nested
// call, a call with one task, and a call while another thread's runs, are run by the caller alone.
// `fn` must not throw.
void parallel_run(int64_t tasks, TaskFn fn, void* context);

// parallel_for(n, grain, f): f(begin, end, thread) over [0, n) in pieces of at least `grain`.
template <class F>
void parallel_for(int64_t n, int64_t grain, const F& f) {
  if (n <= 0) return;
  if (grain < 1) grain = 1;
  const int64_t most = static_cast<int64_t>(num_threads()) * 4;
  int64_t pieces = (n + grain - 1) / grain;
  if (pieces > most) pieces = most;
  if (pieces <= 1) {
    f(int64_t{0}, n, 0);
    return;
  }
  struct Context {
    const F* f;
    int64_t n, pieces;
  } context{&f, n, pieces};
  parallel_run(
      pieces,
      [](void* c, int64_t task, int thread) {
        const Context& ctx = *static_cast<Context*>(c);
        (*ctx.f)(ctx.n* task / ctx.pieces, ctx.n * (task + 1) / ctx.pieces, thread);
      },
      &context);
}

// parallel_tasks(tasks, grain, f): f(task, thread) once for each task; in the caller, in order,
// when there are no more than `grain` tasks.
template <class F>
void parallel_tasks(int64_t tasks, int64_t grain, const F& f) {
  if (tasks <= grain) {
    for (int64_t t = 0; t < tasks; ++t) f(t, 0);
    return;
  }
  parallel_run(
      tasks, [](void* c, int64_t task, int thread) { (*static_cast<const F*>(c))(task, thread); },
      const_cast<F*>(&f));
}

}  // namespace exl3
