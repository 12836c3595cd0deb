// A thread block's share of the turns, and a warp's run of it: its weights come through a ring in
// shared memory, its sums of a group go to a place of their own there.
#pragma once
#include "cuda/common/copy.cuh"
#include "cuda/even/shape.h"
#include "cuda/gemv/product.cuh"

namespace exl3::cuda {

// Where a group is.
struct EvenGroup {
  int weight, inside;  // the weight; which of its groups

  __device__ __forceinline__ EvenGroup(const EvenParams& p, int group) {
    if (p.groups_log == 2) {
      weight = (group >> 1) & 1;
      inside = (group >> 2) * 2 + (group & 1);
    } else {
      weight =
          (group >= p.w[0].group_end) + (group >= p.w[1].group_end) + (group >= p.w[2].group_end);
      inside = weight == 0 ? group : group - p.w[weight - 1].group_end;
    }
  }
};

template <int kBits>
struct EvenShare {
  static constexpr int kTurnsOfBlock = even_turns_of_block(kBits);
  const EvenParams& p;
  int warp, lane;
  int first, last;       // turns of the thread block
  int begin, end;        // of the warp
  int group0;            // of the first turn
  int weight0, weights;  // whose inputs the thread block needs
  int block0, blocks;    // 128-blocks of k that it needs, from block0 on, round the end

  __device__ __forceinline__ explicit EvenShare(const EvenParams& p)
      : p(p), warp(threadIdx.x / kWarp), lane(threadIdx.x & (kWarp - 1)) {
    first = blockIdx.x * p.run * kEvenWarps;
    last = min(first + p.run * kEvenWarps, p.all);
    begin = min(first + warp * p.run, last);
    end = min(begin + p.run, last);
    group0 = group_of(first);
    const int group1 = group_of(last - 1), inside = first - group0 * p.turns;
    block0 = inside / kTurnsOfBlock;
    blocks = (inside % kTurnsOfBlock + last - first + kTurnsOfBlock - 1) / kTurnsOfBlock;
    if (blocks >= p.k_blocks) block0 = 0, blocks = p.k_blocks;
    if (p.groups_log == 2) {
      const bool both = group1 - group0 >= 2 || ((group0 ^ group1) & 2);
      weight0 = both ? 0 : (group0 >> 1) & 1;
      weights = both ? 2 : 1;
    } else {
      weight0 = EvenGroup(p, group0).weight;
      weights = EvenGroup(p, group1).weight - weight0 + 1;
    }
  }

  __device__ __forceinline__ int group_of(int turn) const { return __umulhi(turn, p.per_turns); }
  // Jobs of the input side: a block of one weight each.
  __device__ __forceinline__ int jobs() const { return blocks * weights; }
  __device__ __forceinline__ int weight_of(int job) const {
    return (job >= blocks) + (job >= 2 * blocks) + (job >= 3 * blocks);
  }
  __device__ __forceinline__ int column_of(int job) const {  // the lane's first of four
    int block = block0 + job - weight_of(job) * blocks;
    if (block >= p.k_blocks) block -= p.k_blocks;
    return block * kHadamardDim + lane * 4;
  }
  // Which of the turns of the jobs has the inputs of turn `inside` of a group.
  __device__ __forceinline__ int input_turn(int weight, int inside) const {
    int at = inside - block0 * kTurnsOfBlock;
    if (at < 0) at += p.k_blocks * kTurnsOfBlock;
    return (weight - weight0) * blocks * kTurnsOfBlock + at;
  }
};

template <int kBits, int kDepth>
class EvenStream {
 public:
  static constexpr int kTurnBytes = even_turn_bytes(kBits);

  // Starts the first copies of the warp's run.
  __device__ __forceinline__ EvenStream(const EvenShare<kBits>& share, unsigned char* ring)
      : share_(share), ring_(ring), ahead_(share.begin) {
#pragma unroll 1
    for (int i = 0; i < kDepth; ++i) fetch();
  }

  // The oldest turn, of which each lane sees the words that it copied; its place is filled anew.
  __device__ __forceinline__ void take(LaneWords<kBits> (&words)[even_steps(kBits)]) {
    copy_wait<kDepth - 1>();
    const auto* from = reinterpret_cast<const uint32_t*>(ring_ + slot_ * kTurnBytes);
#pragma unroll
    for (int j = 0; j < even_steps(kBits); ++j)
      words[j].load(from + j * kBits * kWarp, share_.lane);
    fetch();
  }

 private:
  static constexpr int kVector = LaneWords<kBits>::kVector;

  __device__ __forceinline__ void fetch() {
    if (ahead_ < share_.end) {
      if (left_ == 0) locate();
      unsigned char* to = ring_ + slot_ * kTurnBytes + share_.lane * (kVector * 4);
#pragma unroll
      for (int c = 0; c < even_steps(kBits) * kBits / kVector; ++c) {
        copy_async<4 * kVector>(to + c * kWarp * kVector * 4, next_ + c * kWarp * kVector * 4);
      }
      next_ += kTurnBytes;
      ++ahead_;
      --left_;
    }
    copy_commit();
    slot_ = slot_ + 1 == kDepth ? 0 : slot_ + 1;
  }

  // Turns lie in memory in their order, up to the end of a weight (of two groups of gate or up).
  __device__ __forceinline__ void locate() {
    const EvenParams& p = share_.p;
    const int group = share_.group_of(ahead_), inside = ahead_ - group * p.turns;
    const EvenGroup place(p, group);
    const EvenWeight& w = p.w[place.weight];
    next_ = w.planes + (static_cast<int64_t>(place.inside) * p.turns + inside) * kTurnBytes +
            share_.lane * (kVector * 4);
    const int groups = p.groups_log == 2 ? 2 - (group & 1) : min(w.group_end - group, 1 << 20);
    left_ = groups * p.turns - inside;
  }

  const EvenShare<kBits>& share_;
  unsigned char* ring_;
  const unsigned char* next_ = nullptr;
  int ahead_, left_ = 0, slot_ = 0;
};

// Sums of 64 outputs for one row, which stands in all columns of the B fragment alike. kWords words
// of activations a step, of each of kLanes lanes.
//
// mul1: two columns, of low and of high bytes; a word is four activations, each of which stands
// four times in the fragment.
template <int kBits>
struct EvenIntegers {
  static constexpr bool kInteger = true;
  static constexpr int kLanes = 8, kWords = 1;
  static constexpr float kMost = 32639.0f;  // 127 * 256 + 127
  int c[4][4] = {};

  __device__ __forceinline__ void step(const LaneWords<kBits>& words, const uint32_t* row,
                                       const EvenParams&) {
    const uint32_t b[4] = {__byte_perm(*row, 0, 0x0000), __byte_perm(*row, 0, 0x1111),
                           __byte_perm(*row, 0, 0x2222), __byte_perm(*row, 0, 0x3333)};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t x[8];
      mul1_words(words, q, x);
      mma_u8s8(c[q], x[0], x[4], x[1], x[5], b[0], b[1]);
      mma_u8s8(c[q], x[2], x[6], x[3], x[7], b[2], b[3]);
    }
  }

  // The lane's sum of tile q: outputs lane / 4 (h 0) and 8 more (h 1) of sums of integers.
  __device__ __forceinline__ float sum(int q, int h) const {
    return fmaf(256.0f, static_cast<float>(c[q][2 * h + 1]), static_cast<float>(c[q][2 * h]));
  }
  // The row is integers times `unit`, and `inputs` is the sum of the row.
  static __device__ __forceinline__ float value(float sum, float unit, float inputs) {
    const float a = __half2float(__ushort_as_half(kMul1ScaleBits));
    const float constant = kMul1Bias * a + __half2float(__ushort_as_half(kMul1OffsetBits));
    return fmaf(unit * a, sum, constant * inputs);
  }

  // Four inputs of a step, 4*part.. of it: those at i and i + 1 are half part / 2 of a lane's word.
  static __device__ __forceinline__ void store(uint32_t* words, int steps, int part,
                                               const float (&v)[4], float inverse) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the integer
    auto* halves = reinterpret_cast<uint16_t*>(words + 2 * (part & 1) * steps) + (part >> 1);
    uint32_t b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b[i] = __float_as_uint(fmaf(inverse == 0.0f ? 0.0f : v[i], inverse, kRound));
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t low = __byte_perm(b[i], b[i + 1], 0x0040);
      const uint32_t high = __byte_perm(b[i] + 128, b[i + 1] + 128, 0x0051);
      halves[i * steps] = static_cast<uint16_t>(low);
      halves[(i + 8) * steps] = static_cast<uint16_t>(high);
    }
  }
};

// 3inst, mcg: float16, columns all alike.
template <int kBits>
struct EvenHalves {
  static constexpr bool kInteger = false;
  static constexpr int kLanes = 4, kWords = 2;
  static constexpr float kMost = 16.0f;
  float c[4][4] = {};

  __device__ __forceinline__ void step(const LaneWords<kBits>& words, const uint32_t* row,
                                       const EvenParams& p) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t w[4];
      half_words(words, q, p.multiplier, p.increment, w);
      mma_f16(c[q], w[0], w[2], w[1], w[3], row[0], row[1]);
    }
  }

  __device__ __forceinline__ float sum(int q, int h) const { return c[q][2 * h]; }
  static __device__ __forceinline__ float value(float sum, float unit, float) { return unit * sum; }

  static __device__ __forceinline__ void store(uint32_t* words, int steps, int part,
                                               const float (&v)[4], float inverse) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const __half2 pair = __floats2half2_rn(v[2 * i] * inverse, v[2 * i + 1] * inverse);
      words[((part & 1) * 2 + i) * 2 * steps + (part >> 1)] =
          *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
};

// Each of four lanes that have the same sums stores one tile's.
template <class Product>
static __device__ __forceinline__ void even_emit(const Product& product, float* sums, float unit,
                                                 float inputs) {
  const int lane = threadIdx.x & (kWarp - 1);
  float* to = sums + (lane & 3) * kTileDim + (lane >> 2);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float even = lane & 2 ? product.sum(2, h) : product.sum(0, h);
    const float odd = lane & 2 ? product.sum(3, h) : product.sum(1, h);
    to[8 * h] = Product::value(lane & 1 ? odd : even, unit, inputs);
  }
}

template <int kCount>
static __device__ __forceinline__ void load_words(const uint32_t* from, uint32_t (&w)[kCount]) {
  if constexpr (kCount == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    w[0] = v.x, w[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + i);
      w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
    }
  }
}

// The warp's sums of a group stand at sums[warp + group - group0]: no other warp and group has that
// place. `most` is the largest magnitude of each weight's row, `inputs` the sums of its turns.
template <int kBits, class Product, class Stream>
static __device__ __forceinline__ void even_multiply(const EvenShare<kBits>& share, Stream& stream,
                                                     const uint32_t* activations,
                                                     const float* inputs, const uint32_t* most,
                                                     float* sums) {
  constexpr int kSteps = even_steps(kBits), kTurns = even_turns_of_block(kBits);
  const EvenParams& p = share.p;
  int turn = share.begin;
#pragma unroll 1
  while (turn < share.end) {
    const int group = share.group_of(turn), inside = turn - group * p.turns;
    const int count = min(p.turns - inside, share.end - turn);
    const int weight = EvenGroup(p, group).weight, at = share.input_turn(weight, inside);
    float sum = 0.0f;
    for (int i = share.lane; i < count; i += kWarp) sum += inputs[at + i];
    const uint32_t* b = activations + at / kTurns * (kEvenJobBytes / 4) +
                        at % kTurns * even_turn_words(kBits) +
                        (share.lane & (Product::kLanes - 1)) * (Product::kWords * kSteps);
    Product product;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      LaneWords<kBits> words[kSteps];
      uint32_t row[Product::kWords * kSteps];
      load_words(b, row);
      stream.take(words);
#pragma unroll
      for (int j = 0; j < kSteps; ++j) product.step(words[j], row + j * Product::kWords, p);
      b += even_turn_words(kBits);
      if ((at + i) % kTurns == kTurns - 1) b += kEvenJobBytes / 4 - kTurns * even_turn_words(kBits);
    }
    even_emit(product, sums + (share.warp + group - share.group0) * kGemvSumPitch,
              __uint_as_float(most[weight - share.weight0]) * (kHadamardNorm / Product::kMost),
              kHadamardNorm * warp_sum(sum));
    turn += count;
  }
}

}  // namespace exl3::cuda
