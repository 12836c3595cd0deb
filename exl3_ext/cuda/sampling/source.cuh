// The values that are left of a row: logits after every step so far, read again at each pass or,
// once they are few, from a list in shared memory.
#pragma once
#include "cuda/common/vector.cuh"
#include "exl3/sampling.h"

namespace exl3::cuda {

constexpr int kSampleThreads = 1024;
constexpr int kSampleList = 2048;  // entries
constexpr int kSampleBins = 2048;
constexpr float kBinsPerUnit = 64.0f;  // a bin is 1/64 of a logit; the last takes all below

// A step that has been worked out: v = (v - top) / heat, or keep v > least, and of those equal to
// it the ids up to `last`.
struct Stage {
  bool cut;
  float top, heat;
  float least;
  int last;
};

struct Entry {
  float value;
  int id;
};

struct SampleShared {
  Entry list[kSampleList];
  unsigned long long weight[kSampleBins];
  unsigned count[kSampleBins];
  Stage stage[kSampleSteps];
  unsigned long long sums[kSampleThreads / kWarp];
  Entry best[kSampleThreads / kWarp];
  Entry chosen;
  unsigned long long bound, before;
  int bin, listed;
};

// One row while it is worked on; the same in every thread.
struct Source {
  const float* row;
  const uint32_t* mask;
  SampleShared* s;
  int valid;
  int stages;
  bool is_list;  // the list holds exactly what is left
  float top;     // of what is left
  float own;     // the greatest of this thread's columns; NaN: not known

  __device__ __forceinline__ bool allowed(int id) const {
    return !mask || (mask[id / 32] >> (id % 32) & 1);
  }

  // The value of column `id` after all stages; false if it is not left. -inf never is.
  __device__ __forceinline__ bool view(float v, int id, float* out) const {
    if (!allowed(id)) return false;
    for (int i = 0; i < stages; ++i) {
      const Stage& g = s->stage[i];
      if (!g.cut)
        v = __fdiv_rn(__fsub_rn(v, g.top), g.heat);
      else if (!(v > g.least || (v == g.least && id <= g.last)))
        return false;
    }
    *out = v;
    return v > -INFINITY;
  }

  // f(logit, id) for every column.
  template <class F>
  __device__ __forceinline__ void each_column(const F& f) const {
    constexpr int kTurn = kSampleThreads * kVector;
    const bool wide = wide_rows(row, 0);
    for (int at = threadIdx.x * kVector; at < valid; at += 2 * kTurn) {
      float v[2][kVector];  // two loads in flight
      load_part(row, at, valid, wide, v[0]);
      load_part(row, at + kTurn, valid, wide, v[1]);
#pragma unroll
      for (int i = 0; i < 2 * kVector; ++i) {
        const int id = at + i / kVector * kTurn + i % kVector;
        if (id < valid) f(v[i / kVector][i % kVector], id);
      }
    }
  }

  // f(value, id) for everything that is left.
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    if (is_list) {
      for (int i = threadIdx.x; i < s->listed; i += kSampleThreads) {
        f(s->list[i].value, s->list[i].id);
      }
      return;
    }
    each_column([&](float v, int id) {
      float w;
      if (view(v, id, &w)) f(w, id);
    });
  }

  __device__ int bin_of(float v) const {
    const float at = (top - v) * kBinsPerUnit;
    return at < static_cast<float>(kSampleBins - 1) ? static_cast<int>(at) : kSampleBins - 1;
  }
};

static __device__ __forceinline__ bool before(Entry a, Entry b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// The greatest value with its lowest id, for every thread; id -1 if there is none.
static __device__ __forceinline__ Entry best_of_block(SampleShared& s, Entry e) {
#pragma unroll
  for (int h = kWarp / 2; h; h /= 2) {
    const Entry other{__shfl_xor_sync(0xFFFFFFFFu, e.value, h),
                      __shfl_xor_sync(0xFFFFFFFFu, e.id, h)};
    if (other.id >= 0 && (e.id < 0 || before(other, e))) e = other;
  }
  if (threadIdx.x % kWarp == 0) s.best[threadIdx.x / kWarp] = e;
  __syncthreads();
  e = s.best[0];
  for (int i = 1; i < kSampleThreads / kWarp; ++i) {
    const Entry other = s.best[i];
    if (other.id >= 0 && (e.id < 0 || before(other, e))) e = other;
  }
  __syncthreads();
  return e;
}

static __device__ __forceinline__ unsigned long long sum_of_block(SampleShared& s,
                                                                  unsigned long long v) {
#pragma unroll
  for (int h = kWarp / 2; h; h /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, h);
  if (threadIdx.x % kWarp == 0) s.sums[threadIdx.x / kWarp] = v;
  __syncthreads();
  unsigned long long sum = 0;
  for (int i = 0; i < kSampleThreads / kWarp; ++i) sum += s.sums[i];
  __syncthreads();
  return sum;
}

static __device__ __forceinline__ Entry best_of(const Source& from) {
  Entry mine{0.0f, -1};
  from.each([&](float v, int id) {
    if (mine.id < 0 || before({v, id}, mine)) mine = {v, id};
  });
  return best_of_block(*from.s, mine);
}

}  // namespace exl3::cuda
