// Several rows: their inputs were transformed and rounded by a launch before (gemv_input_cuda) and
// come turn by turn through a ring beside that of the weights.
#pragma once
#include "cuda/even/even.cuh"

namespace exl3::cuda {

// Both rings of a warp.
template <int kBits, class Product>
class EvenRowsStream {
 public:
  static constexpr int kDepth = even_rows_depth(kBits), kSteps = even_steps(kBits);
  static constexpr int kTurnWords = kSteps * Product::Input::kStepWords;  // of activations

  __device__ __forceinline__ EvenRowsStream(const EvenShare<kBits>& share, unsigned char* ring,
                                            uint32_t* inputs)
      : share_(share), weights_(share, ring), inputs_(inputs), ahead_(share.begin) {}

  // The first turns' activations; after the launch before is complete.
  __device__ __forceinline__ void start() {
#pragma unroll 1
    for (int i = 0; i < kDepth; ++i) fetch();
    copy_commit();
    copy_wait<0>();
    __syncwarp();
  }

  // The oldest turn: its words, and where its activations stand until the next call.
  __device__ __forceinline__ const uint32_t* take(LaneWords<kBits> (&words)[kSteps]) {
    __syncwarp();  // all lanes are done with the place that is filled now
    fetch();       // in the group of copies that `weights_` commits
    weights_.take(words);
    __syncwarp();
    const uint32_t* at = inputs_ + slot_ * kTurnWords;
    slot_ = slot_ == kDepth ? 0 : slot_ + 1;
    return at;
  }

 private:
  __device__ __forceinline__ void fetch() {
    if (ahead_ < share_.end) {
      const EvenParams& p = share_.p;
      const int group = share_.group_of(ahead_), inside = ahead_ - group * p.turns;
      const int64_t turn = int64_t{EvenGroup(p, group).weight} * p.turns + inside;
      const auto* from = reinterpret_cast<const uint32_t*>(p.workspace) + turn * kTurnWords;
      uint32_t* to = inputs_ + fill_ * kTurnWords;
#pragma unroll
      for (int at = 0; at < kTurnWords; at += kWarp * 4) {
        const int own = at + share_.lane * 4;
        if (own < kTurnWords) copy_async<16>(to + own, from + own);
      }
      ++ahead_;
    }
    fill_ = fill_ == kDepth ? 0 : fill_ + 1;
  }

  const EvenShare<kBits>& share_;
  EvenStream<kBits, kDepth> weights_;
  uint32_t* inputs_;
  int ahead_, fill_ = 0, slot_ = 0;
};

// As even_multiply; the constant part of the weights is added at the end.
template <int kBits, class Product>
static __device__ __forceinline__ void even_multiply_rows(const EvenShare<kBits>& share,
                                                          EvenRowsStream<kBits, Product>& stream,
                                                          const float* scales, float* sums) {
  constexpr int kSteps = even_steps(kBits);
  const EvenParams& p = share.p;
  int turn = share.begin;
#pragma unroll 1
  while (turn < share.end) {
    const int group = share.group_of(turn), inside = turn - group * p.turns;
    const int count = min(p.turns - inside, share.end - turn);
    Product product;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      LaneWords<kBits> words[kSteps];
      const uint32_t* b = stream.take(words);
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        product.step(words[j], b + j * Product::Input::kStepWords, p.multiplier, p.increment);
      }
    }
    product.emit(sums + (share.warp + group - share.group0) * p.rows * kGemvSumPitch, p.rows,
                 scales + EvenGroup(p, group).weight * kGemvMaxRows);
    turn += count;
  }
}

template <class Input>
struct EvenManyRows {
  GemvWorkspace in;
  __device__ __forceinline__ float inverse_rms(int row) const {
    return __ldcg(in.inverse_rms + row);
  }
  __device__ __forceinline__ float constant(int weight, int row) const {
    const int at = weight * kGemvMaxRows + row;
    return Input::offset(__ldcg(in.scale + at), __ldcg(in.sum + at));
  }
};

template <int kBits, class Product>
__global__ void __launch_bounds__(kEvenThreads, 1)
    even_rows_kernel(const __grid_constant__ EvenParams p) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float scales[kLinearGroup * kGemvMaxRows];
  using Input = typename Product::Input;
  start_next();
  if (static_cast<int>(blockIdx.x) * p.run * kEvenWarps >= p.all) return wait_for_last();
  const EvenShare<kBits> share(p);
  constexpr int kRing = even_rows_depth(kBits) * even_turn_bytes(kBits);
  using Stream = EvenRowsStream<kBits, Product>;
  auto* inputs = reinterpret_cast<uint32_t*>(shared + kEvenWarps * kRing);
  auto* sums = reinterpret_cast<float*>(shared + kEvenWarps * kRing + p.input_bytes);
  Stream stream(share, shared + share.warp * kRing,
                inputs + share.warp * (Stream::kDepth + 1) * Stream::kTurnWords);
  using Finish = EvenFinish<kBits, EvenManyRows<Input>>;
  Finish::prepare(share);
  wait_for_last();
  stream.start();
  const int64_t words = int64_t{p.weights} * p.turns * Stream::kTurnWords;
  const GemvWorkspace in(const_cast<unsigned char*>(p.workspace), words * 4, p.weights);
  if (threadIdx.x < p.weights * kGemvMaxRows) scales[threadIdx.x] = __ldcg(in.scale + threadIdx.x);
  __syncthreads();
  even_multiply_rows(share, stream, scales, sums);
  __syncthreads();
  Finish(share, sums, {in}).run();
#endif
}

}  // namespace exl3::cuda
