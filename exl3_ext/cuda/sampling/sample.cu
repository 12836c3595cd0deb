// One token for each row of logits by the steps of its own plan: bias and penalties, temperature,
// top-k, top-p, min-p, then the greatest, with or without Gumbel noise.
//
// Work split: one block of 1024 threads a row. A step is one or two passes over the row (half a
// megabyte at a vocabulary of 128k, from L2) until 2048 entries or fewer are left, as a rule after
// the first cut; those move to shared memory. Values follow the host's sampler (exl3/sampling)
// operation by operation in float32 and float64, so the token is the same. Sums of probabilities
// are the exception: integers here, float64 there; they agree to 1e-7, and a cut moves only if its
// bound lies that near. Bound: what one multiprocessor reads.
#include <cuda_runtime.h>

#include "cuda/sampling/cut.cuh"

namespace exl3 {
namespace {

using namespace cuda;

constexpr float kNoiseError = 1e-3f;  // bound of the error of `rough_noise`, with room to spare

__device__ __forceinline__ uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15ull;

// 53 random bits of a token; SplitMix64 (Steele, Lea, Flood 2014) at counter `id` of the stream.
__device__ __forceinline__ uint64_t bits_of(uint64_t start, int id) {
  return mix((static_cast<uint64_t>(id) + 1) * kGamma + start) >> 11;
}

__device__ __forceinline__ double noise(uint64_t bits) {
  const double u = (static_cast<double>(bits) + 0.5) * 0x1p-53;
  return -log(-log(u));
}

// The same in float32, from the upper bits. Near 1 the logarithm is taken of the distance to 1.
// Where too few bits are left for that (one token in a million) exactly.
__device__ __forceinline__ float rough_noise(uint64_t bits) {
  const auto high = static_cast<uint32_t>(bits >> 21), left = ~high;
  if (high < 4096 || left < 4096) return static_cast<float>(noise(bits));
  const float v = (static_cast<float>(left) + 0.5f) * 0x1p-32f;
  const float u = (static_cast<float>(high) + 0.5f) * 0x1p-32f;
  return -__logf(v < 0x1p-8f ? v * (1.0f + 0.5f * v) : -__logf(u));
}

struct Scored {
  double score;
  int id;
};

__device__ __forceinline__ bool wins(const Scored& a, const Scored& b) {
  return a.id >= 0 && (b.id < 0 || a.score > b.score || (a.score == b.score && a.id < b.id));
}

// The best of this thread's columns by exact scores. Rough scores pick the few worth it: the noise
// takes two logarithms in float64 a token.
__device__ Scored best_scored(const Source& from, uint64_t start) {
  Scored mine{0.0, -1};
  const auto score = [&](float v, int id) {
    const Scored other{noise(bits_of(start, id)) + static_cast<double>(v), id};
    if (wins(other, mine)) mine = other;
  };
  if (from.is_list) {
    from.each(score);
    return mine;
  }
  float best = -INFINITY, second = -INFINITY, value = 0.0f;
  int best_id = -1;
  from.each([&](float v, int id) {
    const float rough = v + rough_noise(bits_of(start, id));
    second = fmaxf(second, fminf(rough, best));
    if (rough > best) best = rough, best_id = id, value = v;
  });
  float floor = best_of_block(*from.s, Entry{best, best_id}).value;
  floor -= kNoiseError * (1.0f + fabsf(floor));
  if (second >= floor)
    from.each(score);
  else if (best >= floor && best_id >= 0)
    score(value, best_id);
  return mine;
}

// argmax of value + noise.
__device__ int draw(const Source& from, uint32_t key) {
  SampleShared& s = *from.s;
  Scored mine = best_scored(from, mix(uint64_t{key} * kGamma + 0x94D049BB133111EBull));
  auto* scores = reinterpret_cast<double*>(s.sums);
#pragma unroll
  for (int h = kWarp / 2; h; h /= 2) {
    const Scored other{__shfl_xor_sync(0xFFFFFFFFu, mine.score, h),
                       __shfl_xor_sync(0xFFFFFFFFu, mine.id, h)};
    if (wins(other, mine)) mine = other;
  }
  if (threadIdx.x % kWarp == 0) {
    scores[threadIdx.x / kWarp] = mine.score;
    s.best[threadIdx.x / kWarp].id = mine.id;
  }
  __syncthreads();
  for (int i = 0; i < kSampleThreads / kWarp; ++i) {
    const Scored other{scores[i], s.best[i].id};
    if (wins(other, mine)) mine = other;
  }
  return mine.id;
}

// The logit of a column after bias and penalties, in the host's order and precision.
__device__ float edited(float v, const SampleEdit& e, const SampleRow& r) {
  v = __fadd_rn(v, e.bias);
  if (r.rep_p != 1.0 && e.rep > 0.0 && isfinite(v)) {
    const double wide = v, full = v > 0.0f ? wide / r.rep_p : wide * r.rep_p;
    v = __double2float_rn(__dadd_rn(__dmul_rn(1.0 - e.rep, wide), __dmul_rn(e.rep, full)));
  }
  if (r.freq_p != 0.0) v = __double2float_rn(__dsub_rn(v, __dmul_rn(r.freq_p, e.total)));
  if (r.pres_p != 0.0 && e.largest > 0.0) {
    v = __double2float_rn(__dsub_rn(v, __dmul_rn(r.pres_p, e.largest)));
  }
  return v;
}

// Moves what is left to the list, if it fits.
__device__ void gather(Source& from) {
  SampleShared& s = *from.s;
  if (from.is_list) {  // cut in place: what is left moves to the front
    Entry mine[kSampleList / kSampleThreads];
    int held = 0;
    const int first = from.stages - 1;
    const Stage g = s.stage[first];
    from.each([&](float v, int id) {
      if (v > g.least || (v == g.least && id <= g.last)) mine[held++] = {v, id};
    });
    __syncthreads();
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    for (int i = 0; i < held; ++i) s.list[atomicAdd(&s.listed, 1)] = mine[i];
    __syncthreads();
    return;
  }
  from.is_list = list_row(from, [](float) { return true; });
}

__device__ void add_cut(Source& from, float least, int last) {
  __syncthreads();
  if (threadIdx.x == 0) from.s->stage[from.stages] = {true, 0.0f, 1.0f, least, last};
  __syncthreads();
  ++from.stages;
  from.own = NAN;
  gather(from);
}

__device__ void heat(Source& from, float temperature) {
  if (!(temperature > 0.0f)) {
    const Entry best = best_of(from);
    return add_cut(from, best.value, best.id);
  }
  const float t = fmaxf(temperature, 1e-30f), top = from.top;
  __syncthreads();
  if (from.is_list) {
    for (int i = threadIdx.x; i < from.s->listed; i += kSampleThreads) {
      from.s->list[i].value = __fdiv_rn(__fsub_rn(from.s->list[i].value, top), t);
    }
  }
  if (threadIdx.x == 0) from.s->stage[from.stages] = {false, top, t, 0.0f, 0};
  __syncthreads();
  ++from.stages;
  from.top = 0.0f;
  from.own = __fdiv_rn(__fsub_rn(from.own, top), t);
}

// The list is everything left: its first k entries and those equal to the last of them.
__device__ void cut_list_top_k(Source& from, int k) {
  SampleShared& s = *from.s;
  const int n = s.listed;
  if (n <= k) return;
  sort_list(s, n);
  if (threadIdx.x == 0) {
    int end = k;
    while (end < n && s.list[end].value == s.list[k - 1].value) ++end;
    s.bin = end;
  }
  __syncthreads();
  keep_first(from, s.bin);
}

// The k-th greatest of the threads' own bests bounds the k-th of all from below, and few lie above
// it. False if too many do.
__device__ bool list_top_k(Source& from, int k) {
  SampleShared& s = *from.s;
  __syncthreads();
  s.list[threadIdx.x] = {from.own, static_cast<int>(threadIdx.x)};
  __syncthreads();
  sort_list(s, kSampleThreads);
  const float least = s.list[k - 1].value;
  return list_row(from, [&](float v) { return v >= least; });
}

__device__ void cut_top_k(Source& from, double k) {
  if (k >= from.valid) return;
  const int count = static_cast<int>(k);
  if (!from.is_list && count <= kSampleThreads && from.own == from.own) {
    from.is_list = list_top_k(from, count);
  }
  if (from.is_list) return cut_list_top_k(from, count);
  const unsigned long long total = fill_bins<true>(from);
  if (total <= static_cast<unsigned long long>(count)) return;
  const Entry at = crossing_of_row<true>(from, static_cast<unsigned long long>(count) - 1);
  add_cut(from, at.value, INT32_MAX);
}

__device__ void cut_top_p(Source& from, double limit, bool inclusive) {
  SampleShared& s = *from.s;
  unsigned long long mine = 0;
  from.each([&](float v, int) { mine += weight_of<false>(v, from.top); });
  const auto all = sum_of_block(s, mine);
  const double total = static_cast<double>(all), share = limit * total;
  if (share >= total) return;
  // Exclusive: up to the entry that exceeds the share. Inclusive: with the one that reaches it.
  const double exact = inclusive ? ceil(share) - 1.0 : floor(share);
  const auto bound = static_cast<unsigned long long>(exact > 0.0 ? exact : 0.0);
  if (!from.is_list) {
    // Entries this light have no more than the rest of the share between them: all come too late.
    const auto light = static_cast<unsigned long long>((total - share) / from.valid);
    from.is_list = list_row(from, [&](float v) { return weight_of<false>(v, from.top) > light; });
  }
  if (from.is_list) {
    const int n = s.listed;
    sort_list(s, n);
    const int at = crossing_of_list<false>(from, 0, bound, n);
    return keep_first(from, at < n && (inclusive || at == 0) ? at + 1 : at);  // rank 1 stays
  }
  fill_bins<false>(from);
  const Entry at = crossing_of_row<false>(from, bound);
  const bool keep = inclusive || (at.value == from.top && at.id == best_of(from).id);
  add_cut(from, at.value, keep ? at.id : at.id - 1);
}

__device__ void run_steps(Source& from, const SampleRow& r) {
  for (int i = 0; i < r.steps; ++i) {
    const double value = r.step[i].value;
    switch (r.step[i].kind) {
      case kSampleTemperature:
        heat(from, static_cast<float>(value));
        break;
      case kSampleTopK:
        cut_top_k(from, value);
        break;
      case kSampleTopP:
      case kSampleTopPInclusive:
        cut_top_p(from, value, r.step[i].kind == kSampleTopPInclusive);
        break;
      default:
        add_cut(from, __double2float_rn(static_cast<double>(from.top) + value), INT32_MAX);
    }
  }
}

__global__ void __launch_bounds__(kSampleThreads) sample_kernel(SampleParams p) {
  __shared__ SampleShared s;
  __shared__ SampleRow r;
  if (threadIdx.x == 0) r = p.plans[blockIdx.x];
  __syncthreads();
  float* row = p.x + blockIdx.x * p.x_stride;
  const auto each_edit = [&](const auto& f) {
    for (int i = threadIdx.x; i < r.count; i += kSampleThreads) {
      const int64_t at = int64_t{r.first} + i;
      if (at < 0 || at >= p.n_edits) continue;
      SampleEdit& e = p.edits[at];
      if (e.id >= 0 && e.id < p.valid) f(e);
    }
    __syncthreads();
  };
  each_edit([&](SampleEdit& e) {
    e.before = row[e.id];
    row[e.id] = edited(e.before, e, r);
  });
  Source from{};
  from.row = row;
  from.s = &s;
  from.valid = static_cast<int>(p.valid);
  if (r.mask >= 0 && r.mask < p.n_masks) from.mask = p.masks + r.mask * ((p.valid + 31) / 32);
  // NaN and infinity are left to the host.
  int odd = 0;
  Entry mine{-INFINITY, -1};
  from.each_column([&](float v, int id) {
    if (!from.allowed(id)) return;
    if (!(v < INFINITY)) odd = 1;
    if (v > mine.value) mine = {v, id};  // ids go up
  });
  odd = __syncthreads_or(odd);
  const Entry best = best_of_block(s, mine);
  int token = -1;
  if (!odd && best.id >= 0) {
    from.top = best.value;
    from.own = mine.value;
    run_steps(from, r);
    if (r.draw)
      token = draw(from, r.key);
    else
      token = r.steps ? best_of(from).id : best.id;
  }
  __syncthreads();
  each_edit([&](const SampleEdit& e) { row[e.id] = e.before; });
  if (threadIdx.x == 0) p.index[blockIdx.x] = token;
}

}  // namespace

Status sample_cuda(const SampleParams& p, CudaStream stream) {
  if (p.rows == 0) return Status::kOk;
  if (p.valid >= INT32_MAX) return Status::kBadArgument;
  sample_kernel<<<static_cast<unsigned>(p.rows), kSampleThreads, 0, stream>>>(p);
  return launch_status();
}

}  // namespace exl3
