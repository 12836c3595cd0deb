// Small-batch product of a trellis weight, both Hadamard sides in the same launch.
//
//   y = svh * Hblk(Hblk(norm(x) * suh) @ W') (+ bias, activation, residual)
//
// Work split: a cluster of 1..8 thread blocks owns 128 outputs (with an activation: of gate and the
// same of up), each thread block a part of k. It transforms its part of x (one row) or copies what
// a launch before made (more rows); a warp multiplies 64 outputs by every second or fourth step of
// 16 inputs. Sums go to the inbox of the thread block that finishes the row (row mod cluster),
// which adds them in a fixed order. The factor 1/rms is one a row and is applied there. Memory: a
// ring of weights that each thread copies for itself, activations, inbox (shape.h). Bound: bytes of
// weights; next the ALU pipe (28 instructions for a tile of 256 mul1 weights at 4 bits), and for
// small weights the chain of latencies from x to y. Chosen: up to 16 rows, and by 16 rows at a time
// while that is faster than decoding W'.
//
// The next launch may start at once (programmatic launch): it loads weights and scales while this
// one ends, and reads or writes nothing else before this one is complete.
#pragma once
#include "cuda/common/copy.cuh"
#include "cuda/gemv/product.cuh"

namespace exl3::cuda {

constexpr int kGemvThreads = kGemvWarps * kWarp;
constexpr int kKept = 2;  // blocks of the row that a warp keeps in registers between the passes

// What a thread block works on.
struct GemvPart {
  int cluster_log, rank;  // rank: which part of k
  int weight;             // of gate, with an activation
  int block;              // of 128 outputs inside the weight
  int column;             // of y
  int first, blocks;      // its 128-blocks of k
  int pair;               // 1 with an activation

  __device__ __forceinline__ explicit GemvPart(const GemvParams& p) {
    cluster_log = 31 - __clz(p.config.cluster);
    block = blockIdx.x >> cluster_log;
    rank = blockIdx.x & (p.config.cluster - 1);
    weight = 0;
    column = 0;
    pair = p.activation >= 0 ? 1 : 0;
    if (!pair) {
      while (block >= static_cast<int>(p.w[weight].n) / kHadamardDim) {
        block -= static_cast<int>(p.w[weight].n) / kHadamardDim;
        column += static_cast<int>(p.w[weight].out_features);
        ++weight;
      }
    }
    column += block * kHadamardDim;
    const int all = static_cast<int>(p.k) / kHadamardDim;
    first = (all * rank) >> cluster_log;
    blocks = ((all * (rank + 1)) >> cluster_log) - first;
  }
  __device__ __forceinline__ int outputs() const { return kHadamardDim << pair; }
  __device__ __forceinline__ int own_rows(int rows) const {
    return (rows + (1 << cluster_log) - 1) >> cluster_log;
  }
  // Outputs of this block that exist, from the lane's four on.
  __device__ __forceinline__ int count(const GemvParams& p) const {
    return count4(block * kHadamardDim + (threadIdx.x & (kWarp - 1)) * 4, p.w[weight].out_features);
  }
};

struct GemvMemory {
  uint32_t* ring;
  uint32_t* activations;  // [half][step][kStepWords]
  float* inbox;           // [rank][own row][outputs + 4]; the sum of squares after the sums
};

// Constants of the output side, loaded while the launch before may still run.
struct GemvOutputs {
  float scale[2 * kHadamardDim], bias[2 * kHadamardDim];
  float residual[kHadamardDim];  // of the first own row

  __device__ __forceinline__ void load(const GemvParams& p, const GemvPart& part) {
    const int output = threadIdx.x & (kHadamardDim - 1), half = threadIdx.x / kHadamardDim;
    if (half > part.pair) return;
    const LinearWeightRef& w = p.w[part.weight + half];
    const int column = part.block * kHadamardDim + output;
    scale[threadIdx.x] = kHadamardNorm * half_value(w.svh[column]);
    bias[threadIdx.x] = w.bias && column < w.out_features ? w.bias[column] : 0.0f;
  }
};

// Transforms, rounds and stores this thread block's part of the one row. Jobs are its (half,
// block).
template <class Input>
struct FusedInput {
  float factor[kKept][4];

  static __device__ __forceinline__ void job_of(const GemvPart& part, int job, int& half,
                                                int& block) {
    half = job >= part.blocks ? 1 : 0;
    block = part.first + job - half * part.blocks;
  }

  __device__ __forceinline__ void prepare(const GemvParams& p, const GemvPart& part) {
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const int job = threadIdx.x / kWarp + k * kGemvWarps;
      int half, block;
      job_of(part, job, half, block);
      if (job < part.blocks << part.pair) {
        input_factors(p, p.w[part.weight + half].suh, block, factor[k]);
      }
    }
  }

  // The lane's part of x^2 over the thread block's part of k; ends with a barrier.
  __device__ __forceinline__ float run(const GemvParams& p, const GemvPart& part,
                                       uint32_t* activations, GemvScales& scales) {
    const int warp = threadIdx.x / kWarp, jobs = part.blocks << part.pair;
    uint4 raw[kKept];
    float v[kKept][4], more[4], squares = 0.0f, square;
    uint32_t most;
    int half, block;
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      job_of(part, warp + k * kGemvWarps, half, block);
      if (warp + k * kGemvWarps < jobs) raw[k] = input_raw(p, 0, block);
    }
    for (int job = warp, k = 0; job < jobs; job += kGemvWarps, ++k) {
      job_of(part, job, half, block);
      if (k == 0) {
        input_transform(p, raw[0], factor[0], v[0], &square, &most);
      } else if (k == 1) {
        input_transform(p, raw[1], factor[1], v[1], &square, &most);
      } else {
        float again[4];
        input_factors(p, p.w[part.weight + half].suh, block, again);
        input_transform(p, input_raw(p, 0, block), again, more, &square, &most);
      }
      if (half == 0) squares += square;
      if ((threadIdx.x & (kWarp - 1)) == 0) atomicMax(&scales.most[half][0], most);
    }
    __syncthreads();
    for (int job = warp, k = 0; job < jobs; job += kGemvWarps, ++k) {
      job_of(part, job, half, block);
      if (k >= kKept) {
        float again[4];
        input_factors(p, p.w[part.weight + half].suh, block, again);
        input_transform(p, input_raw(p, 0, block), again, more, &square, &most);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) more[i] = k == 0 ? v[0][i] : v[1][i];
      }
      const float magnitude = __uint_as_float(scales.most[half][0]);
      const int sum = warp_sum(Input::store(activations + job * kStepsOfBlock * Input::kStepWords,
                                            0, more, inverse_of(magnitude, Input::kMost)));
      if ((threadIdx.x & (kWarp - 1)) == 0) {
        scales.scale[half][0] = scale_of(magnitude, Input::kMost);
        if (Input::kInteger) atomicAdd(&scales.sum[half][0], sum);
      }
    }
    __syncthreads();
    return squares;
  }
};

// Copies this thread block's part of what the launch before made; ends with a barrier.
template <class Input>
static __device__ __forceinline__ void copy_input(const GemvParams& p, const GemvPart& part,
                                                  uint32_t* activations, GemvScales& scales) {
  const int64_t weight_words = p.k / kTileDim * Input::kStepWords;
  const GemvWorkspace in(p.workspace, p.count * weight_words * 4, p.count);
  const int part_words = part.blocks * kStepsOfBlock * Input::kStepWords;
  for (int half = 0; half <= part.pair; ++half) {
    const uint32_t* from = in.activations + (part.weight + half) * weight_words +
                           part.first * kStepsOfBlock * Input::kStepWords;
    for (int at = threadIdx.x * 4; at < part_words; at += kGemvThreads * 4) {
      *reinterpret_cast<uint4*>(activations + half * part_words + at) =
          __ldcg(reinterpret_cast<const uint4*>(from + at));
    }
  }
  if (threadIdx.x < kGemvMaxRows) {
    for (int half = 0; half <= part.pair; ++half) {
      const int at = (part.weight + half) * kGemvMaxRows + threadIdx.x;
      scales.scale[half][threadIdx.x] = in.scale[at];
      scales.sum[half][threadIdx.x] = in.sum[at];
    }
    scales.inverse_rms[threadIdx.x] = in.inverse_rms[threadIdx.x];
  }
  __syncthreads();
}

// Adds the warps' sums and sends them to the thread block that finishes each row.
template <class Input>
static __device__ __forceinline__ void send(const GemvParams& p, const GemvPart& part,
                                            const GemvMemory& memory, const GemvScales& scales,
                                            int ring_words) {
  const int rows = static_cast<int>(p.m), outputs = part.outputs();
  const int groups = 2 << part.pair, subs = kGemvWarps / groups;
  const int pitch = outputs + 4, own_rows = part.own_rows(rows);
  for (int at = threadIdx.x; at < rows * outputs; at += kGemvThreads) {
    const int row = at >> (7 + part.pair), output = at & (outputs - 1);
    const int half = output / kHadamardDim, group = output / 64;
    // The constant part counts once: in the sum of the first part of k, or of each with its own.
    float total = 0.0f;
    if (gemv_fused(rows) || part.rank == 0) {
      total = Input::offset(scales.scale[half][row], scales.sum[half][row]);
    }
    for (int sub = 0; sub < subs; ++sub) {
      const auto* sums =
          reinterpret_cast<const float*>(memory.ring + (sub * groups + group) * ring_words);
      total += sums[row * kGemvSumPitch + output % 64];
    }
    const int own = row >> part.cluster_log;
    store_remote(memory.inbox + (part.rank * own_rows + own) * pitch + output,
                 row & ((1 << part.cluster_log) - 1), total);
  }
}

// Output side of this thread block's rows: a warp a row, a lane four outputs.
static __device__ __forceinline__ void finish(const GemvParams& p, const GemvPart& part,
                                              const GemvMemory& memory, const GemvScales& scales,
                                              const GemvOutputs& constants) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x & (kWarp - 1);
  const int rows = static_cast<int>(p.m), cluster = 1 << part.cluster_log;
  const int own_rows = part.own_rows(rows), pitch = part.outputs() + 4, count = part.count(p);
  for (int own = warp; own * cluster + part.rank < rows; own += kGemvWarps) {
    const int row = own * cluster + part.rank;
    float inverse_rms = 1.0f;
    if (!gemv_fused(rows)) {
      inverse_rms = scales.inverse_rms[row];
    } else if (p.norm_weight) {
      float square = 0.0f;
      for (int rank = 0; rank < cluster; ++rank) square += memory.inbox[(rank + 1) * pitch - 4];
      inverse_rms = rsqrtf(square / static_cast<float>(p.in_features) + p.norm_eps);
    }
    float result[4];
    for (int half = 0; half <= part.pair; ++half) {
      float v[4] = {};
      for (int rank = 0; rank < cluster; ++rank) {
        const float4 sums = *reinterpret_cast<const float4*>(
            memory.inbox + (rank * own_rows + own) * pitch + half * kHadamardDim + lane * 4);
        v[0] += sums.x, v[1] += sums.y, v[2] += sums.z, v[3] += sums.w;
      }
      warp_hadamard_128(v);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int output = half * kHadamardDim + lane * 4 + i;
        v[i] = fmaf(v[i], inverse_rms * constants.scale[output], constants.bias[output]);
        result[i] = half == 1 ? activate(result[i], p.activation) * v[i] : v[i];
      }
    }
    const int column = part.column + lane * 4;
    if (p.residual.data) {
      float s[4];
      if (own == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = constants.residual[lane * 4 + i];
      } else {
        load4(p.residual.data, p.residual.type, row * p.residual.stride + column, count, s);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) result[i] += s[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) store_value(p.y.data, p.y.type, row * p.y.stride + column + i, result[i]);
    }
  }
}

template <int kBits>
static __device__ __forceinline__ void fetch(uint32_t* slot, const uint32_t* row, int lane) {
  constexpr int kVector = LaneWords<kBits>::kVector;
#pragma unroll
  for (int c = 0; c < kBits / kVector; ++c) {
    const int at = (c * kWarp + lane) * kVector;
    copy_async<4 * kVector>(slot + at, row + at);
  }
}

// A warp's weights: where its steps are, and its ring of those in flight.
template <int kBits>
struct WeightStream {
  static constexpr int kDepth = gemv_depth(kBits), kRowWords = kWarp * kBits;
  uint32_t* ring;
  const uint32_t* next;
  int stride, steps;

  __device__ __forceinline__ WeightStream(const GemvParams& p, const GemvPart& part, uint32_t* ring,
                                          int half, int group, int sub, int subs)
      : ring(ring), stride(subs * kRowWords), steps(part.blocks * kStepsOfBlock / subs) {
    const int64_t row = static_cast<int64_t>(part.block * 2 + group) * (p.k / kTileDim) +
                        part.first * kStepsOfBlock + sub;
    next = reinterpret_cast<const uint32_t*>(p.w[part.weight + half].planes) + row * kRowWords;
  }

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (i < steps) fetch<kBits>(ring + i * kRowWords, next, threadIdx.x & (kWarp - 1));
      copy_commit();
      next += stride;
    }
  }

  template <class Product>
  __device__ __forceinline__ void multiply(Product& product, const uint32_t* activations, int subs,
                                           bool mcg) {
    const int lane = threadIdx.x & (kWarp - 1);
    const uint32_t multiplier = mcg ? kMcgMul : k3instMul, increment = mcg ? 0 : k3instAdd;
    // Two steps a turn (their number is even): the instructions of one fill the waits of the other.
    int slot = 0;
    for (int i = 0; i < steps; i += 2) {
      copy_wait<kDepth - 2>();
      LaneWords<kBits> now[2];
      now[0].load(ring + slot * kRowWords, lane);
      now[1].load(ring + (slot + 1) * kRowWords, lane);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (i + j + kDepth < steps) {
          fetch<kBits>(ring + (slot + j) * kRowWords, next + j * stride, lane);
        }
        copy_commit();
      }
      product.step(now[0], activations, multiplier, increment);
      product.step(now[1], activations + subs * Product::Input::kStepWords, multiplier, increment);
      activations += 2 * subs * Product::Input::kStepWords;
      next += 2 * stride;
      slot = slot + 2 == kDepth ? 0 : slot + 2;
    }
  }
};

template <int kBits, class Product, int kBlocksPerSm>
__global__ void __launch_bounds__(kGemvThreads, kBlocksPerSm)
    gemv_kernel(const __grid_constant__ GemvParams p, const GemvShared sizes) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ GemvScales scales;
  __shared__ GemvOutputs constants;
  using Input = typename Product::Input;
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  cluster_arrive();
  const GemvPart part(p);
  const GemvMemory memory{reinterpret_cast<uint32_t*>(shared),
                          reinterpret_cast<uint32_t*>(shared + sizes.ring),
                          reinterpret_cast<float*>(shared + sizes.ring + sizes.activations)};
  const int warp = threadIdx.x / kWarp, rows = static_cast<int>(p.m);
  const int groups = 2 << part.pair, subs = kGemvWarps / groups;
  const int group = warp & (groups - 1), sub = warp >> (1 + part.pair), half = group >> 1;
  const int ring_words = sizes.ring / 4 / kGemvWarps;
  uint32_t* ring = memory.ring + warp * ring_words;
  WeightStream<kBits> weights(p, part, ring, half, group & 1, sub, subs);
  weights.start();
  constants.load(p, part);
  if (threadIdx.x < 2) scales.most[threadIdx.x][0] = 0, scales.sum[threadIdx.x][0] = 0;
  FusedInput<Input> fused;
  if (gemv_fused(rows)) fused.prepare(p, part);
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
  if (warp == kGemvWarps - 1 && p.residual.data && part.rank < rows) {
    const int lane = threadIdx.x & (kWarp - 1);
    float s[4];
    load4(p.residual.data, p.residual.type, part.rank * p.residual.stride + part.column + lane * 4,
          part.count(p), s);
#pragma unroll
    for (int i = 0; i < 4; ++i) constants.residual[lane * 4 + i] = s[i];
  }
  float squares = 0.0f;
  if (gemv_fused(rows)) {
    squares = fused.run(p, part, memory.activations, scales);
  } else {
    copy_input<Input>(p, part, memory.activations, scales);
  }
  Product product;
  weights.multiply(
      product, memory.activations + (half * part.blocks * kStepsOfBlock + sub) * Input::kStepWords,
      subs, p.w[0].codebook == Codebook::kMcg);
  __syncwarp();  // the ring's last words have been read by all lanes
  product.emit(reinterpret_cast<float*>(ring), rows, scales.scale[half]);
  // The sum of squares of each warp goes beside its sums, in the padding of the first row.
  if (gemv_fused(rows) && p.norm_weight) {
    squares = warp_sum(squares);
    if ((threadIdx.x & (kWarp - 1)) == 0) reinterpret_cast<float*>(ring)[64] = squares;
  }
  __syncthreads();
  cluster_wait();  // every thread block of the cluster runs
  send<Input>(p, part, memory, scales, ring_words);
  if (gemv_fused(rows) && p.norm_weight && threadIdx.x == 0) {
    float total = 0.0f;
    for (int w = 0; w < kGemvWarps; ++w) {
      total += reinterpret_cast<const float*>(memory.ring + w * ring_words)[64];
    }
    store_remote(memory.inbox + (part.rank + 1) * (part.outputs() + 4) - 4, 0, total);
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  finish(p, part, memory, scales, constants);
}

}  // namespace exl3::cuda
