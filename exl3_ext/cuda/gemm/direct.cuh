// Product of 17 to some hundred rows straight from lane words, output side in the same launch.
//
//   y = svh * row_scale * Hblk(inner @ W') (+ bias, activation, residual)
//
// Work split: a thread block has 2 or 4 warpgroups, kRows rows of `inner` and some blocks of 128
// outputs; a warpgroup multiplies 128 outputs by its share of the steps of each chunk of 64 inputs.
// A warp decodes two tiles a step to float16 A fragments in registers; the rows are B, in shared
// memory. k is shared by the thread blocks of a cluster; gate and up have their own. Sums stay in
// each one's shared memory and are read through it by the warp that finishes a row and block, in a
// fixed order. Memory: a ring of chunks of rows and weights by bulk copies, later the sums. Bound:
// instructions of the decoding (40 a tile of 256 weights) up to 64 rows, then the tensor cores.
//
// The next launch may start at once (programmatic launch); weights are fetched while the launch
// before ends.
#pragma once
#include "cuda/common/rows.cuh"
#include "cuda/gemm/direct_shape.h"
#include "cuda/gemm/fragment.cuh"
#include "cuda/gemm/wgmma.cuh"

namespace exl3::cuda {

constexpr int kDirectWarps = kDirectThreads / kWarp;

// What a thread block works on.
struct DirectPart {
  int cluster, rank;  // thread blocks; which one
  int weight;
  int block, blocks;  // its first block of 128 outputs inside the weight, and how many
  int64_t column;     // of y
  int row, rows;      // its rows
  int shares;         // chunks of a stage
  int64_t first;      // its stages of k
  int turns;

  __device__ __forceinline__ DirectPart(const DirectParams& p, int kRows) {
    const bool pair = p.activation >= 0;
    const DirectConfig& c = p.config;
    cluster = pair ? 2 * c.parts : c.parts;
    rank = static_cast<int>(blockIdx.x) % cluster;
    const int row_blocks = static_cast<int>((p.m + kRows - 1) / kRows);
    int unit = static_cast<int>(blockIdx.x) / cluster;
    row = unit % row_blocks * kRows;
    rows = min(kRows, static_cast<int>(p.m) - row);
    unit /= row_blocks;
    weight = pair && rank >= c.parts ? 1 : 0;
    column = 0;
    int all = static_cast<int>(p.w[weight].n) / kHadamardDim;
    if (!pair) {
      while (unit >= (all + c.blocks - 1) / c.blocks) {
        unit -= (all + c.blocks - 1) / c.blocks;
        column += p.w[weight].out_features;
        ++weight;
        all = static_cast<int>(p.w[weight].n) / kHadamardDim;
      }
    }
    block = unit * c.blocks;
    blocks = min(c.blocks, all - block);
    column += block * kHadamardDim;
    shares = direct_shares(c.blocks);
    const int part = rank % c.parts, stages = static_cast<int>(p.k) / (kChunk * shares);
    first = stages * part / c.parts;
    turns = stages * (part + 1) / c.parts - static_cast<int>(first);
  }
};

struct DirectBarriers {
  uint64_t full[kMostStages], empty[kMostStages];
};
constexpr uint32_t kEmptyBytes = kMostStages * 8;  // from a stage's full to its empty

// Four floats at the same place in the shared memory of another thread block of the cluster.
static __device__ __forceinline__ float4 load_remote4(const float* here, int rank) {
  float4 v;
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;"
      " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(shared_address(here)), "r"(rank)
      : "memory");
  return v;
}

// Out of line: the kernel is long as it is.
static __device__ __noinline__ float activate_other(float v, int kind) { return activate(v, kind); }

// The output side of one block of 128 outputs: a warp, a lane four outputs.
struct DirectFinish {
  float factor[2][4], bias[2][4];  // of gate and up, if gated
  int count;                       // of the lane's outputs that exist
  int64_t column;                  // of y
  const float* sums;               // of row 0

  __device__ __forceinline__ DirectFinish(const DirectParams& p, const DirectPart& part, int block,
                                          const float* all_sums) {
    const int at = block * kHadamardDim + (threadIdx.x & (kWarp - 1)) * 4;
    const int output = part.block * kHadamardDim + at;
    const int weight = p.activation >= 0 ? 0 : part.weight;
    count = count4(output, p.w[weight].out_features);
    column = part.column + at;
    sums = all_sums + at;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && p.activation < 0) continue;
      const LinearWeightRef& w = p.w[weight + half];
      load4(w.svh, DType::kFloat16, output, 4, factor[half]);
      bias[half][0] = bias[half][1] = bias[half][2] = bias[half][3] = 0.0f;
      if (w.bias) load4(w.bias, DType::kFloat32, output, count, bias[half]);
    }
  }

  // Sums of `parts` thread blocks from `rank` on, added in order.
  template <int kCount>
  static __device__ __forceinline__ void add_parts(const float* from, int64_t step, int rank,
                                                   int parts, float (&v)[kCount][4]) {
    constexpr int kAtOnce = kCount == 1 ? 8 : 1;  // loads in flight
#pragma unroll
    for (int r = 0; r < kCount; ++r) v[r][0] = v[r][1] = v[r][2] = v[r][3] = 0.0f;
    for (int part = 0; part < parts; part += kAtOnce) {
      float4 sum[kAtOnce][kCount] = {};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (part + j >= parts) continue;
#pragma unroll
        for (int r = 0; r < kCount; ++r) sum[j][r] = load_remote4(from + r * step, rank + part + j);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int r = 0; r < kCount; ++r) {
          v[r][0] += sum[j][r].x, v[r][1] += sum[j][r].y;
          v[r][2] += sum[j][r].z, v[r][3] += sum[j][r].w;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kCount; ++r) warp_hadamard_128(v[r]);
  }

  // Rows row, row + stride, ..: kCount of them, whose waits overlap.
  template <int kCount>
  __device__ __forceinline__ void run(const DirectParams& p, const DirectPart& part, int row,
                                      int stride, const float* scales) const {
    const int64_t pitch = direct_pitch(p.config.blocks), y_row = part.row + row;
    float v[kCount][4], more[kCount][4], add[kCount][4] = {};
    if (p.residual.data) {
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
        load4(p.residual.data, p.residual.type, (y_row + r * stride) * p.residual.stride + column,
              count, add[r]);
      }
    }
    add_parts(sums + row * pitch, stride * pitch, 0, p.config.parts, v);
    if (p.activation >= 0) {
      add_parts(sums + row * pitch, stride * pitch, p.config.parts, p.config.parts, more);
    }
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const float scale = scales[row + r * stride] * kHadamardNorm;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[r][i] = fmaf(v[r][i], scale * factor[0][i], bias[0][i]);
        if (p.activation >= 0) {
          v[r][i] = p.activation == 0 ? __fdividef(v[r][i], 1.0f + __expf(-v[r][i]))
                                      : activate_other(v[r][i], p.activation);
          v[r][i] *= fmaf(more[r][i], scale * factor[1][i], bias[1][i]);
        }
        v[r][i] += add[r][i];
      }
      store4(p.y.data, p.y.type, (y_row + r * stride) * p.y.stride + column, count, v[r]);
    }
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What a lane copies of every stage: the rows of its chunks (lane 31) or the weights of 64 outputs.
// Any warp may fill a stage.
struct DirectCopies {
  const unsigned char* from;
  uint32_t barriers, to;  // in shared memory
  int bytes, all_bytes, stage_bytes;
  bool rows, weights;

  __device__ __forceinline__ DirectCopies(const DirectParams& p, const DirectInput& in,
                                          const DirectPart& part, uint32_t shared,
                                          uint32_t barriers, int bits, int kRows)
      : barriers(barriers) {
    asm volatile("" : "+r"(this->barriers));  // kept, not computed again at each use
    const int lane = threadIdx.x & (kWarp - 1);
    const int input_bytes = part.shares * direct_input_bytes(kRows);
    const int group_bytes = part.shares * direct_group_bytes(bits);
    stage_bytes = direct_stage_bytes(kRows, p.config.blocks, bits);
    all_bytes = input_bytes + 2 * part.blocks * group_bytes;
    rows = lane == kWarp - 1;
    weights = lane < 2 * part.blocks;
    bytes = rows ? input_bytes : group_bytes;
    to = shared + (rows ? 0 : input_bytes + lane * group_bytes);
    if (rows) {
      from = reinterpret_cast<const unsigned char*>(in.rows[part.weight]) +
             part.row * p.k * static_cast<int>(sizeof(half_bits));
    } else {
      from = reinterpret_cast<const unsigned char*>(p.w[part.weight].planes) +
             (part.block * 2 + lane) * p.k * (8 * bits);
    }
    from += part.first * bytes;
  }

  __device__ __forceinline__ uint32_t full(int slot) const { return barriers + slot * 8; }
  __device__ __forceinline__ uint32_t empty(int slot) const { return full(slot) + kEmptyBytes; }
  __device__ __forceinline__ void expect(int slot) const {
    if ((threadIdx.x & (kWarp - 1)) == 0) barrier_expect(full(slot), all_bytes);
    __syncwarp();
  }
  __device__ __forceinline__ void copy(int slot, int turn, bool mine) const {
    if (!mine) return;
    copy_bulk(to + slot * stage_bytes, from + static_cast<int64_t>(turn) * bytes, bytes,
              full(slot));
  }
};

// Sums of a warpgroup: 128 outputs by kRows rows.
template <int kBits, bool kMul1, int kRows>
struct DirectProduct {
  using Words = LaneWords<kBits, 2>;
  float d[2][kRows / 2] = {};

  __device__ __forceinline__ void run(const DirectParams& p, const DirectPart& part,
                                      const DirectCopies& copies, const unsigned char* shared,
                                      int warp) {
    constexpr int kStepWords = kWarp * kBits;
    const int lane = threadIdx.x & (kWarp - 1), stages = p.config.stages;
    const uint32_t multiplier = p.w[0].codebook == Codebook::kMcg ? kMcgMul : k3instMul;
    const uint32_t increment = p.w[0].codebook == Codebook::kMcg ? 0u : k3instAdd;
    // Which block of outputs, and which chunk of a stage.
    const int block = warp / 4 / part.shares, share = warp / 4 % part.shares;
    const unsigned char* words_at =
        shared + part.shares * direct_input_bytes(kRows) +
        ((block * 2 + (warp >> 1 & 1)) * part.shares + share) * direct_group_bytes(kBits);
    const uint32_t rows_at = shared_address(shared) + share * direct_input_bytes(kRows);
    uint32_t a[2][2][4];
    int slot = 0, parity = 0, stage = 0;
    Words next;
    if (part.turns > 0) {
      barrier_wait(copies.full(0), 0);
      next.load_half(reinterpret_cast<const uint32_t*>(words_at), lane, warp & 1);
    }
#pragma unroll 1
    for (int turn = 0; turn < part.turns; ++turn) {
      const uint32_t b = wgmma_matrix(rows_at + stage);
      const auto* words = reinterpret_cast<const uint32_t*>(words_at + stage);
      const int before = (slot == 0 ? stages : slot) - 1;
      // All have read the stage before that, or soon will: the turn's warp fills it again.
      if (turn >= 2 && turn % kDirectWarps == warp && turn - 2 + stages < part.turns) {
        const int free = (before == 0 ? stages : before) - 1;
        barrier_wait(copies.empty(free), free < slot ? parity : parity ^ 1);
        copies.expect(free);
        copies.copy(free, turn - 2 + stages, copies.rows || copies.weights);
        __syncwarp();
      }
      if (++slot == stages) slot = 0, parity ^= 1;
      stage = slot * copies.stage_bytes;
#pragma unroll
      for (int s = 0; s < kChunkSteps; ++s) {
        const Words now = next;
        if (s + 1 < kChunkSteps) {
          next.load_half(words + (s + 1) * kStepWords, lane, warp & 1);
        } else if (turn + 1 < part.turns) {
          barrier_wait(copies.full(slot), parity);
          next.load_half(reinterpret_cast<const uint32_t*>(words_at + stage), lane, warp & 1);
        }
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          tile_fragment<kBits, 2, kMul1>(now, q, multiplier, increment, a[s & 1][q]);
        }
        wgmma_fence();
        wgmma<kRows>(d[0], a[s & 1][0], b + 2 * s);
        wgmma<kRows>(d[1], a[s & 1][1], b + 2 * s);
        wgmma_commit();
        wgmma_wait<1>();  // those of the step before: its fragments and rows are free
        if (s == 0 && turn > 0 && lane == 0) barrier_arrive(copies.empty(before));
      }
    }
    wgmma_wait<0>();
  }

  // Writes, or adds, to sums[row * pitch + output].
  __device__ __forceinline__ void emit(float* sums, int pitch, int warp, bool add) const {
    const int lane = threadIdx.x & (kWarp - 1);
    sums += (warp & 3) * 32 + lane / 4 + 2 * (lane & 3) * pitch;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        float* to = sums + (i / 4 * 8 + (i & 1)) * pitch + q * kTileDim + (i >> 1 & 1) * 8;
        *to = add ? *to + d[q][i] : d[q][i];
      }
    }
  }
};

template <int kBits, bool kMul1, int kRows>
static __device__ __forceinline__ void run_direct(const DirectParams& p, const DirectInput& in,
                                                  unsigned char* shared, DirectBarriers* barriers,
                                                  float* scales) {
  const DirectPart part(p, kRows);
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kWarp, 0);
  const int stages = p.config.stages, ahead = min(stages, part.turns);
  const DirectCopies copies(p, in, part, shared_address(shared), shared_address(barriers), kBits,
                            kRows);
  if (threadIdx.x < stages) {
    barrier_init(copies.full(threadIdx.x), 1);
    barrier_init(copies.empty(threadIdx.x), kDirectWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  for (int s = warp; s < ahead; s += kDirectWarps) {
    copies.expect(s);
    copies.copy(s, s, copies.weights);
  }
  cudaGridDependencySynchronize();
  for (int s = warp; s < ahead; s += kDirectWarps) copies.copy(s, s, copies.rows);
  if (threadIdx.x < part.rows) scales[threadIdx.x] = in.row_scale[part.row + threadIdx.x];
  __syncwarp();
  DirectProduct<kBits, kMul1, kRows> product;
  product.run(p, part, copies, shared, warp);
  __syncthreads();  // the ring has been read: sums take its place
  const int pitch = direct_pitch(p.config.blocks), block = warp % p.config.blocks;
  auto* sums = reinterpret_cast<float*>(shared);
  for (int turn = 0; turn < part.shares; ++turn) {
    if (turn > 0) __syncthreads();
    if (turn == warp / 4 % part.shares) {
      product.emit(sums + warp / 4 / part.shares * kHadamardDim, pitch, warp, turn > 0);
    }
  }
  const DirectFinish finish(p, part, block, sums);
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  const int row_warps = kDirectWarps / p.config.blocks, stride = row_warps * part.cluster;
  int row = block < part.blocks ? part.rank * row_warps + warp / p.config.blocks : part.rows;
  for (; row + 3 * stride < part.rows; row += 4 * stride) {
    finish.run<4>(p, part, row, stride, scales);
  }
  for (; row < part.rows; row += stride) finish.run<1>(p, part, row, stride, scales);
  __syncwarp();
  cluster_meet_arrive();  // none ends while another reads its sums
  cluster_wait();
}

#endif

template <int kBits, bool kMul1, int kRows>
__global__ void __launch_bounds__(kDirectThreads, direct_resident(kRows))
    direct_kernel(const __grid_constant__ DirectParams p, const __grid_constant__ DirectInput in) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char shared[];
  __shared__ DirectBarriers barriers;
  __shared__ float scales[kRows];
  cudaTriggerProgrammaticLaunchCompletion();
  const uint32_t ahead = -shared_address(shared) & (kSwizzleBytes - 1);
  run_direct<kBits, kMul1, kRows>(p, in, shared + ahead, &barriers, scales);
#endif
}

}  // namespace exl3::cuda
