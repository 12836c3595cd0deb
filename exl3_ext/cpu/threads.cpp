#include "cpu/threads.h"

#include <pthread.h>
#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace exl3 {
namespace {

constexpr int kMaxThreads = 1024;
// About 50 us on current cores: longer than the gap between two ops of a replayed decode step.
constexpr int kSpins = 4000;

inline void cpu_pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

thread_local bool t_in_task = false;

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      stop_.store(true);
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& w : workers_) w.join();
  }

  int threads() const { return threads_; }

  void run(int64_t tasks, TaskFn fn, void* context) {
    std::lock_guard<std::mutex> turn(caller_mutex_);
    fn_ = fn;
    context_ = context;
    tasks_ = tasks;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(threads_ - 1, std::memory_order_relaxed);
    generation_.fetch_add(1);  // seq_cst: pairs with the sleepers_ check of a worker going to sleep
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      wake_.notify_all();
    }
    take(0);
    for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) {
      if (spins < kSpins)
        cpu_pause();
      else
        sched_yield();
    }
  }

 private:
  void take(int thread) {
    t_in_task = true;
    for (;;) {
      const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks_) break;
      fn_(context_, task, thread);
    }
    t_in_task = false;
  }

  void work(int thread) {
    uint64_t seen = 0;
    for (;;) {
      int spins = 0;
      while (generation_.load(std::memory_order_acquire) == seen) {
        if (++spins < kSpins) {
          cpu_pause();
          continue;
        }
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return generation_.load() != seen; });
        sleepers_.fetch_sub(1);
      }
      seen = generation_.load(std::memory_order_acquire);
      if (stop_.load()) return;
      take(thread);
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int threads_;
  std::vector<std::thread> workers_;
  std::mutex caller_mutex_;
  TaskFn fn_ = nullptr;
  void* context_ = nullptr;
  int64_t tasks_ = 0;
  alignas(64) std::atomic<uint64_t> generation_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> busy_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
};

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    const int n = CPU_COUNT(&set);
    if (n > 0) return n;
  }
  const int n = static_cast<int>(std::thread::hardware_concurrency());
  return n > 0 ? n : 1;
}

std::mutex g_mutex;
std::shared_ptr<Pool> g_pool;  // started by the first parallel call
std::atomic<int> g_wanted{0};  // 0: not set

// The child of a fork has no workers: forget the parent's pool (its threads do not exist here, so
// it must not be destroyed either) and start a new one when needed.
void forget_pool() {
  new (&g_mutex) std::mutex;
  new std::shared_ptr<Pool>(std::move(g_pool));
  t_in_task = false;
}

std::shared_ptr<Pool> pool() {
  std::lock_guard<std::mutex> lock(g_mutex);
  if (!g_pool || g_pool->threads() != num_threads()) {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, forget_pool); });
    g_pool = std::make_shared<Pool>(num_threads());
  }
  return g_pool;
}

}  // namespace

int num_threads() {
  int n = g_wanted.load(std::memory_order_relaxed);
  if (n == 0) {
    n = usable_cores();
    if (n > kMaxThreads) n = kMaxThreads;
    g_wanted.store(n, std::memory_order_relaxed);
  }
  return n;
}

void set_num_threads(int n) {
  if (n <= 0) n = usable_cores();
  if (n > kMaxThreads) n = kMaxThreads;
  g_wanted.store(n, std::memory_order_relaxed);
}

void parallel_run(int64_t tasks, TaskFn fn, void* context) {
  if (tasks <= 0) return;
  if (tasks == 1 || t_in_task || num_threads() == 1) {
    for (int64_t t = 0; t < tasks; ++t) fn(context, t, 0);
    return;
  }
  pool()->run(tasks, fn, context);
}

}  // namespace exl3
