// The threads of a block as contexts of one thread of the CPU.
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <vector>

#include "cuda_runtime.h"

namespace on_cpu {

int current = 0;
int offered[kThreads];
bool overflowed = false;
Size block, grid;

namespace {

enum State { kReady, kAtBlock, kAtWarp, kDone };
constexpr size_t kStack = 128 * 1024;

ucontext_t scheduler, contexts[kThreads];
State state[kThreads];
void (*kernel_to_run)();

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(3);
}

void leave(State next) {
  state[current] = next;
  swapcontext(&contexts[current], &scheduler);
}

void thread_main() {
  kernel_to_run();
  leave(kDone);
}

// Runs a warp until its lanes wait for the block or are done.
void run_warp(int first) {
  for (;;) {
    int waiting = 0, others = 0;
    for (current = first; current < first + 32; ++current) {
      const int lane = current;
      if (state[lane] == kReady) {
        swapcontext(&scheduler, &contexts[lane]);
        current = lane;
      }
      waiting += state[lane] == kAtWarp;
      others += state[lane] == kAtBlock;
    }
    if (!waiting) return;
    if (others) fail("lanes of a warp wait for different things");
    for (int i = first; i < first + 32; ++i)
      if (state[i] == kAtWarp) state[i] = kReady;
  }
}

}  // namespace

void meet_block() { leave(kAtBlock); }
void meet_warp() { leave(kAtWarp); }

void run_block(void (*kernel)(), unsigned seed) {
  static std::vector<char> stacks(kThreads * kStack);
  kernel_to_run = kernel;
  for (int i = 0; i < kThreads; ++i) {
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = &stacks[i * kStack];
    contexts[i].uc_stack.ss_size = kStack;
    contexts[i].uc_link = nullptr;
    makecontext(&contexts[i], thread_main, 0);
    state[i] = kReady;
  }
  std::vector<int> order(kThreads / 32);
  std::iota(order.begin(), order.end(), 0);
  for (;;) {
    for (size_t i = order.size() - 1; i > 0; --i) {
      seed = seed * 1664525u + 1013904223u;
      std::swap(order[i], order[(seed >> 8) % (i + 1)]);
    }
    for (const int warp : order) run_warp(32 * warp);
    const auto done = std::count(state, state + kThreads, kDone);
    if (done == kThreads) return;
    if (done) fail("some threads are done while others wait for them");
    std::fill(state, state + kThreads, kReady);
  }
}

}  // namespace on_cpu
