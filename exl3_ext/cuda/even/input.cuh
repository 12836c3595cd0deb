// The input side of the even product: Hblk(x * norm * suh) of a thread block's jobs, rounded by
// one scale a weight: to integers 256*high + low (mul1) or float16.
//
// A job's place in shared memory holds its lanes' factors first, then their transformed values, at
// last the rounded ones. Code that runs once a launch is read from far, so it is kept short: loops
// over jobs, two at a time, the next x on its way.
#pragma once
#include "cuda/common/reduce.cuh"
#include "cuda/even/work.cuh"

namespace exl3::cuda {

struct EvenRow {
  uint32_t most[kLinearGroup];  // largest magnitude as bits, of each weight's row
  float inverse_rms;
  float squares[kEvenThreads];
};

// Four values at a column that is a multiple of four, from beyond the multiprocessor: launches that
// share it may have read what stood there before.
static __device__ __forceinline__ uint4 aligned_raw4(const Rows& row, int64_t column) {
  if (row.type == DType::kFloat32) {
    return __ldcg(reinterpret_cast<const uint4*>(static_cast<const float*>(row.data) + column));
  }
  const uint2 u =
      __ldcg(reinterpret_cast<const uint2*>(static_cast<const half_bits*>(row.data) + column));
  return uint4{u.x, u.y, 0, 0};
}

template <int kBits, bool kNorm, class Product>
class EvenInput {
 public:
  // `inputs`: the sum of each turn of the jobs, before the norm of the transform.
  __device__ __forceinline__ EvenInput(const EvenShare<kBits>& share, uint32_t* activations,
                                       float* inputs, EvenRow& row)
      : share_(share), p_(share.p), activations_(activations), inputs_(inputs), row_(row) {}

  // What does not depend on launches before.
  __device__ __forceinline__ void prepare() const {
    if (threadIdx.x < kLinearGroup) row_.most[threadIdx.x] = 0;
#pragma unroll 1
    for (int job = share_.warp; job < share_.jobs(); job += kEvenWarps) {
      const int column = share_.column_of(job);
      float f[4], n[4];
      const half_bits* suh = p_.w[share_.weight0 + share_.weight_of(job)].suh;
      const uint2 raw = *reinterpret_cast<const uint2*>(suh + column);
      convert4(uint4{raw.x, raw.y, 0, 0}, DType::kFloat16, f);
      if constexpr (kNorm) {
        convert4(*reinterpret_cast<const uint4*>(p_.norm_weight + column), DType::kFloat32, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) f[i] *= n[i] + p_.norm_offset;
      }
      *kept(job) = float4{f[0], f[1], f[2], f[3]};
    }
  }

  // Ends with a barrier.
  __device__ __forceinline__ void run() const {
    constexpr int kAtOnce = 2, kStride = kAtOnce * kEvenWarps;
    const int jobs = share_.jobs();
    uint4 raw[kAtOnce];
    load(share_.warp, raw);
    if constexpr (kNorm) row_.squares[threadIdx.x] = squares();
#pragma unroll 1
    for (int first = share_.warp; first < jobs; first += kStride) {
      float v[kAtOnce][4];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) convert4(raw[i], p_.x.type, v[i]);
      if (first + kStride < jobs) load(first + kStride, raw);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {  // beyond the last job, the first one again
        const int job = first + i * kEvenWarps < jobs ? first + i * kEvenWarps : first;
        const float4 f = *kept(job);
        v[i][0] *= f.x, v[i][1] *= f.y, v[i][2] *= f.z, v[i][3] *= f.w;
        if (Product::kInteger && first + i * kEvenWarps < jobs) note_sums(job, v[i][0]);
        warp_hadamard_128(v[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        uint32_t most = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) most = max(most, __float_as_uint(fabsf(v[i][e])));
        most = warp_max(most);
        const int job = first + i * kEvenWarps;
        if (job >= jobs) continue;
        *kept(job) = float4{v[i][0], v[i][1], v[i][2], v[i][3]};
        if (share_.lane == 0) atomicMax(&row_.most[share_.weight_of(job)], most);
      }
    }
    __syncthreads();
    if constexpr (kNorm) {
      if (share_.warp == kEvenWarps - 1) note_rms();
    }
#pragma unroll 2
    for (int job = share_.warp; job < jobs; job += kEvenWarps) {
      const float inverse =
          inverse_of(__uint_as_float(row_.most[share_.weight_of(job)]), Product::kMost);
      const float4 v = *kept(job);
      __syncwarp();  // the place is read before it is written
      store(activations_ + job * (kEvenJobBytes / 4), {v.x, v.y, v.z, v.w}, inverse);
    }
    __syncthreads();
  }

 private:
  struct Four {
    float v[4];
  };

  __device__ __forceinline__ float4* kept(int job) const {
    return reinterpret_cast<float4*>(activations_ + job * (kEvenJobBytes / 4)) + share_.lane;
  }

  __device__ __forceinline__ void load(int first, uint4 (&raw)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int job = min(first + i * kEvenWarps, share_.jobs() - 1);
      raw[i] = aligned_raw4(p_.x, share_.column_of(job));
    }
  }

  // The thread's part of the whole row's sum of squares.
  __device__ __forceinline__ float squares() const {
    const int k = p_.k_blocks * kHadamardDim;
    float square = 0.0f;
#pragma unroll 1
    for (int c = threadIdx.x * 4; c < k; c += kEvenThreads * 16) {
      uint4 r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = c + i * kEvenThreads * 4;
        r[i] = column < k ? aligned_raw4(p_.x, column) : uint4{};
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float s[4];
        convert4(r[i], p_.x.type, s);
        square += s[0] * s[0] + s[1] * s[1] + s[2] * s[2] + s[3] * s[3];
      }
    }
    return square;
  }
  __device__ __forceinline__ void note_rms() const {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < kEvenWarps; ++i) square += row_.squares[i * kWarp + share_.lane];
    square = warp_sum(square);
    const auto k = static_cast<float>(p_.k_blocks * kHadamardDim);
    if (share_.lane == 0) row_.inverse_rms = rsqrtf(square / k + p_.norm_eps);
  }

  // A block's transform adds up to 128 times its first value, and a half or a quarter of it to 64
  // or 32 times a sum or difference of two or four values: exact before they are rounded.
  __device__ __forceinline__ void note_sums(int job, float v) const {
    constexpr int kTurns = even_turns_of_block(kBits), kLanes = kWarp / kTurns;
#pragma unroll
    for (int h = kLanes; h < kWarp; h *= 2) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, v, h);
      v = share_.lane & h ? other - v : v + other;
    }
    if (share_.lane % kLanes == 0) {
      inputs_[job * kTurns + share_.lane / kLanes] = v * (kHadamardDim / kTurns);
    }
  }

  // Step lane / 4 of the block, inputs 4 * (lane mod 4)..
  __device__ __forceinline__ void store(uint32_t* block, const Four& four, float inverse) const {
    constexpr int kSteps = even_steps(kBits);
    const int step = share_.lane >> 2;
    uint32_t* words =
        block + step / kSteps * even_turn_words(kBits) + step % kSteps * Product::kWords;
    Product::store(words, kSteps, share_.lane & 3, four.v, inverse);
  }

  const EvenShare<kBits>& share_;
  const EvenParams& p_;
  uint32_t* activations_;
  float* inputs_;
  EvenRow& row_;
};

}  // namespace exl3::cuda
