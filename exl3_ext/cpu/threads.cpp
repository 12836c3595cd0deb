// A job is one word, (tasks, next): claiming a task is one compare-and-swap on it, so a worker that
// comes late, or never because another process has its core, takes nothing and is not waited for.
// The caller waits only for tasks that a worker has claimed.
#include "cpu/threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace exl3 {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int64_t kMaxTasks = int64_t{1} << 30;  // of one job
// How long a thread without work spins before it lets others have the core at each turn, and before
// it sleeps: the gap between two ops of a replayed step is under 1 us, from Python 5 to 50 us.
constexpr auto kSpinTime = std::chrono::microseconds(20);
constexpr auto kYieldTime = std::chrono::microseconds(200);

thread_local bool t_in_task = false;

inline void cpu_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Waiting that becomes more polite with time.
class Backoff {
 public:
  // False once the time is up; the clock is read every 16th call.
  bool wait() {
    if (++calls_ % 16 != 0) {
      if (yielding_ && calls_ % 4 == 0)
        sched_yield();
      else
        cpu_pause();
      return true;
    }
    const auto now = std::chrono::steady_clock::now();
    if (calls_ == 16) start_ = now;
    yielding_ = now - start_ > kSpinTime;
    return now - start_ < kYieldTime;
  }

 private:
  unsigned calls_ = 0;
  bool yielding_ = false;
  std::chrono::steady_clock::time_point start_;
};

class Pool {
 public:
  explicit Pool(int threads) : wanted_(threads) {
    // Signals are for the threads of the program, not for ours.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {
      // No more threads to be had: the tasks are shared by those that started.
    } catch (const std::bad_alloc&) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      stop_.store(true);
      ++wakes_;
    }
    wake_.notify_all();
    for (auto& w : workers_) w.join();
  }

  int wanted() const { return wanted_; }

  // One caller at a time.
  void run(int64_t tasks, TaskFn fn, void* context) {
    fn_ = fn;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    job_.store(static_cast<uint64_t>(tasks) << 32);  // pairs with the check of a worker that sleeps
    if (sleepers_.load() > 0) wake(tasks - 1);
    t_in_task = true;
    take(0);
    t_in_task = false;
    for (Backoff backoff; done_.load(std::memory_order_acquire) != tasks;) backoff.wait();
  }

 private:
  static bool has_work(uint64_t job) { return static_cast<uint32_t>(job) < (job >> 32); }

  void wake(int64_t count) {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    const int sleepers = sleepers_.load();
    ++wakes_;
    if (count >= sleepers) {
      wake_.notify_all();
    } else {
      for (int64_t i = 0; i < count; ++i) wake_.notify_one();
    }
  }

  void take(int thread) {
    uint64_t job = job_.load(std::memory_order_acquire);
    while (has_work(job)) {
      if (!job_.compare_exchange_weak(job, job + 1, std::memory_order_acq_rel)) continue;
      // Claimed: the job, and so fn_ and context_, stays until done_ counts this task.
      fn_(context_, static_cast<int64_t>(static_cast<uint32_t>(job)), thread);
      done_.fetch_add(1, std::memory_order_release);
      job = job_.load(std::memory_order_acquire);
    }
  }

  void work(int thread) {
    t_in_task = true;
    while (!stop_.load(std::memory_order_relaxed)) {
      Backoff backoff;
      bool more = true;
      while (more && !has_work(job_.load(std::memory_order_relaxed))) more = backoff.wait();
      if (more)
        take(thread);
      else
        sleep();
    }
  }

  void sleep() {
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    const uint64_t seen = wakes_;
    sleepers_.fetch_add(1);
    // A wake counts even if its job is over by now: more will follow.
    wake_.wait(lock, [&] { return wakes_ != seen || has_work(job_.load()) || stop_.load(); });
    sleepers_.fetch_sub(1);
  }

  const int wanted_;
  std::vector<std::thread> workers_;
  TaskFn fn_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> job_{0};  // tasks << 32 | next
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex sleep_mutex_;
  uint64_t wakes_ = 0;  // guarded by sleep_mutex_
  std::condition_variable wake_;
};

// Cores' worth of time that the control group of a container grants, or `most`.
int quota_cores(int most) {
  long long quota = -1, period = 0;
  if (std::FILE* f = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    if (std::fscanf(f, "%lld %lld", &quota, &period) != 2) quota = -1;  // "max": no limit
    std::fclose(f);
  }
  if (quota <= 0 || period <= 0) return most;
  const long long cores = (quota + period - 1) / period;
  return cores < most ? static_cast<int>(cores) : most;
}

int usable_cores() {
  int n = 0;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) n = CPU_COUNT(&set);
  if (n <= 0) n = static_cast<int>(std::thread::hardware_concurrency());
  return n > 0 ? quota_cores(n) : 1;
}

std::mutex g_turn;             // held by the caller whose job runs; guards g_pool
Pool* g_pool = nullptr;        // started by the first parallel call, never freed at exit
std::atomic<int> g_wanted{0};  // 0: not set

// The child of a fork has none of the workers, and a lock that another thread of the parent held
// stays held: start anew. The parent's pool is left alone, since its threads cannot be joined.
void forget_pool() {
  new (&g_turn) std::mutex;
  g_pool = nullptr;
  t_in_task = false;
}

Pool& pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  (void)registered;
  if (!g_pool || g_pool->wanted() != num_threads()) {
    delete g_pool;
    g_pool = nullptr;
    g_pool = new Pool(num_threads());
  }
  return *g_pool;
}

}  // namespace

int num_threads() {
  int n = g_wanted.load(std::memory_order_relaxed);
  if (n == 0) {
    set_num_threads(0);
    n = g_wanted.load(std::memory_order_relaxed);
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
  if (tasks > 1 && tasks <= kMaxTasks && !t_in_task && num_threads() > 1) {
    std::unique_lock<std::mutex> turn(g_turn, std::try_to_lock);
    if (turn.owns_lock()) {
      pool().run(tasks, fn, context);
      return;
    }
  }
  for (int64_t t = 0; t < tasks; ++t) fn(context, t, 0);
}

}  // namespace exl3
