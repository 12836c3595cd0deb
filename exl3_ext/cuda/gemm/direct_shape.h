// Sizes that the kernel and the choice of its configuration share.
#pragma once
#include <algorithm>

#include "exl3/gemm_direct.h"

namespace exl3::cuda {

constexpr int kChunk = 64;  // inputs: rows of 128 bytes
constexpr int kChunkSteps = kChunk / kTileDim;
constexpr int kMostStages = 12;
constexpr int kFewestStages = 3;  // two turns pass before a stage is filled again

// A thread has `rows` sums; what is left of the registers decides how many thread blocks of two
// warpgroups a multiprocessor holds.
constexpr int kDirectWarpgroups = 2;
constexpr int kDirectThreads = kDirectWarpgroups * 128;
constexpr int direct_resident(int rows) { return rows > 64 ? 1 : 2; }

// Warpgroups that share 128 outputs: each has a chunk of every stage.
constexpr int direct_shares(int blocks) { return kDirectWarpgroups / blocks; }

// Of one chunk: rows, weights of 64 outputs.
constexpr int direct_input_bytes(int rows) { return rows * kChunk * 2; }
constexpr int direct_group_bytes(int bits) { return 64 * kChunk * bits / 8; }
constexpr int direct_stage_bytes(int rows, int blocks, int bits) {
  return direct_shares(blocks) * (direct_input_bytes(rows) + 2 * blocks * direct_group_bytes(bits));
}
// Floats from a row of sums to the next: rows that a store writes fall in different banks.
constexpr int direct_pitch(int blocks) { return blocks * kHadamardDim + 4; }
constexpr int direct_sum_bytes(int rows, int blocks) { return rows * direct_pitch(blocks) * 4; }

constexpr int kSwizzleBytes = 1024;  // stages begin at multiples of it
constexpr int direct_shared_bytes(const DirectConfig& c, int bits) {
  return std::max(c.stages * direct_stage_bytes(c.rows, c.blocks, bits),
                  direct_sum_bytes(c.rows, c.blocks)) +
         kSwizzleBytes;
}

// Dynamic shared memory that a thread block may have so that direct_resident of them fit.
constexpr int direct_room(int rows, int shared_bytes, int shared_bytes_all) {
  constexpr int kReserved = 2048;  // of each: 1 KiB by the system, barriers, scales
  return std::min(shared_bytes, shared_bytes_all / direct_resident(rows)) - kReserved;
}

// What a launch before wrote (InputSideParams::chunk_rows).
struct DirectInput {
  const half_bits* rows[kLinearGroup];  // [row block][k/64][config.rows][64], swizzled
  const float* row_scale;               // [m]
};

// The launch of one bit rate's instance; in direct_low.cu and direct_high.cu.
template <int kBits>
Status direct_of_bits(const DirectParams& p, const DirectInput& in, int64_t thread_blocks,
                      CudaStream stream);
// Clusters of `cluster` thread blocks that run at once, with the instance for `rows` at 4 bits.
int direct_clusters(int rows, int cluster, int shared_bytes);

}  // namespace exl3::cuda
