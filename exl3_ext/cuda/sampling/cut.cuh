// Where a cut by rank falls: the first entry, from the greatest down, at which the weights so far
// exceed a bound. Weights are integers, so their sums do not depend on the order of threads.
#pragma once
#include "cuda/sampling/source.cuh"

namespace exl3::cuda {

constexpr float kUnit = 1099511627776.0f;  // 2^40: the weight of the greatest entry

// Weight of an entry: 1 (top-k), or its probability relative to the greatest (top-p).
template <bool kCount>
static __device__ __forceinline__ unsigned long long weight_of(float v, float top) {
  return kCount ? 1ull : __float2ull_rn(expf(v - top) * kUnit);
}

// Fills the histogram; returns the sum of all weights.
template <bool kCount>
static __device__ __forceinline__ unsigned long long fill_bins(const Source& from) {
  SampleShared& s = *from.s;
  for (int i = threadIdx.x; i < kSampleBins; i += kSampleThreads) s.weight[i] = 0, s.count[i] = 0;
  __syncthreads();
  from.each([&](float v, int) {
    const int bin = from.bin_of(v);
    atomicAdd(&s.weight[bin], weight_of<kCount>(v, from.top));
    atomicAdd(&s.count[bin], 1u);
  });
  __syncthreads();
  unsigned long long mine = 0;
  for (int i = threadIdx.x; i < kSampleBins; i += kSampleThreads) mine += s.weight[i];
  return sum_of_block(s, mine);
}

// The bin in which the running sum first exceeds `bound`, and the sum before it; by one warp.
static __device__ __forceinline__ void find_bin(SampleShared& s, unsigned long long bound) {
  if (threadIdx.x < kWarp) {
    const int lane = threadIdx.x;
    unsigned long long so_far = 0;
    for (int base = 0; base < kSampleBins; base += kWarp) {
      unsigned long long sum = s.weight[base + lane];
      for (int h = 1; h < kWarp; h *= 2) {
        const unsigned long long other = __shfl_up_sync(0xFFFFFFFFu, sum, h);
        if (lane >= h) sum += other;
      }
      const unsigned past = __ballot_sync(0xFFFFFFFFu, so_far + sum > bound);
      if (past) {
        const int owner = __ffs(past) - 1;
        if (lane == owner) s.bin = base + lane, s.before = so_far + sum - s.weight[base + lane];
        break;
      }
      so_far += __shfl_sync(0xFFFFFFFFu, sum, kWarp - 1);
    }
  }
  __syncthreads();
}

// Sorts the first `n` entries of the list: greatest first, then lowest id.
static __device__ __forceinline__ void sort_list(SampleShared& s, int n) {
  int size = 2;
  while (size < n) size *= 2;
  for (int i = n + threadIdx.x; i < size; i += kSampleThreads) s.list[i] = {-INFINITY, INT32_MAX};
  __syncthreads();
  for (int block = 2; block <= size; block *= 2) {
    for (int step = block / 2; step; step /= 2) {
      for (int i = threadIdx.x; i < size; i += kSampleThreads) {
        const int j = i ^ step;
        if (j <= i) continue;
        const Entry a = s.list[i], b = s.list[j];
        if (before(b, a) == ((i & block) == 0)) s.list[i] = b, s.list[j] = a;
      }
      __syncthreads();
    }
  }
}

// Order of values as unsigned numbers; never NaN here.
static __device__ __forceinline__ unsigned rank_of_value(float v) {
  const unsigned bits = __float_as_uint(v + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ float value_of_rank(unsigned rank) {
  return __uint_as_float(rank & 0x80000000u ? rank & 0x7FFFFFFFu : ~rank);
}

// The crossing entry by bisection, for rows with more entries in a bin than the list holds: first
// its value, then its id among equals.
template <bool kCount>
static __device__ __noinline__ Entry bisect(const Source& from, unsigned long long bound) {
  SampleShared& s = *from.s;
  unsigned low = 0, high = 0xFFFFFFFFu;  // the greatest rank with a sum over the bound
  while (low < high) {
    const unsigned middle = low + (high - low) / 2 + 1;
    unsigned long long mine = 0;
    from.each([&](float v, int) {
      if (rank_of_value(v) >= middle) mine += weight_of<kCount>(v, from.top);
    });
    if (sum_of_block(s, mine) > bound)
      low = middle;
    else
      high = middle - 1;
  }
  const float value = value_of_rank(low);
  unsigned long long mine = 0;
  from.each([&](float v, int) {
    if (v > value) mine += weight_of<kCount>(v, from.top);
  });
  const unsigned long long above = sum_of_block(s, mine);
  int first = 0, last = from.valid - 1;  // the least id with a sum over the bound
  while (first < last) {
    const int middle = first + (last - first) / 2;
    mine = 0;
    from.each([&](float v, int id) {
      if (v == value && id <= middle) mine += weight_of<kCount>(v, from.top);
    });
    if (above + sum_of_block(s, mine) > bound)
      last = middle;
    else
      first = middle + 1;
  }
  return {value, first};
}

// In the sorted list: the first entry at which `so_far` and the weights exceed `bound`; n if none
// does.
template <bool kCount>
static __device__ __forceinline__ int crossing_of_list(const Source& from,
                                                       unsigned long long so_far,
                                                       unsigned long long bound, int n) {
  constexpr int kEach = kSampleList / kSampleThreads;
  SampleShared& s = *from.s;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  unsigned long long weights[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = threadIdx.x * kEach + i;
    weights[i] = at < n ? weight_of<kCount>(s.list[at].value, from.top) : 0;
    sum += weights[i];
  }
  unsigned long long until = sum;
  for (int h = 1; h < kWarp; h *= 2) {
    const unsigned long long other = __shfl_up_sync(0xFFFFFFFFu, until, h);
    if (lane >= h) until += other;
  }
  if (lane == kWarp - 1) s.sums[warp] = until;
  if (threadIdx.x == 0) s.bin = n;
  __syncthreads();
  until += so_far - sum;
  for (int i = 0; i < warp; ++i) until += s.sums[i];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const unsigned long long before_it = until;
    until += weights[i];
    if (before_it <= bound && until > bound) s.bin = threadIdx.x * kEach + i;
  }
  __syncthreads();
  const int found = s.bin;
  __syncthreads();
  return found;
}

// The first entry of the row at which the weights so far exceed `bound`, which the sum of all does.
// The histogram is filled. Spoils the list.
template <bool kCount>
static __device__ __forceinline__ Entry crossing_of_row(const Source& from,
                                                        unsigned long long bound) {
  SampleShared& s = *from.s;
  find_bin(s, bound);
  const int bin = s.bin, n = static_cast<int>(s.count[bin]);
  if (n > kSampleList) return bisect<kCount>(from, bound);
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  from.each([&](float v, int id) {
    if (from.bin_of(v) == bin) s.list[atomicAdd(&s.listed, 1)] = {v, id};
  });
  __syncthreads();
  sort_list(s, n);
  const unsigned long long so_far = s.before;
  const Entry found = s.list[crossing_of_list<kCount>(from, so_far, bound, n)];
  __syncthreads();
  return found;
}

// Fills the list with what is left of the row and passes `test`; false if it does not fit.
template <class F>
static __device__ __forceinline__ bool list_row(const Source& from, const F& test) {
  SampleShared& s = *from.s;
  __syncthreads();
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  from.each([&](float v, int id) {
    if (!test(v)) return;
    const int at = atomicAdd(&s.listed, 1);
    if (at < kSampleList) s.list[at] = {v, id};
  });
  __syncthreads();
  return s.listed <= kSampleList;
}

// The list sorted, and its first `n` entries kept.
static __device__ __forceinline__ void keep_first(const Source& from, int n) {
  __syncthreads();
  if (threadIdx.x == 0) from.s->listed = n;
  __syncthreads();
}

}  // namespace exl3::cuda
