// A few rows straight from lane words on a GPU, in equal shares for all multiprocessors.
#pragma once
#include "exl3/gemv.h"

namespace exl3 {

struct EvenDevice {
  int multiprocessors;
  int shared_bytes;      // that one thread block may have; 0: the device has no such kernel
  int shared_bytes_all;  // of a multiprocessor
  bool pairs;            // launches share multiprocessors (cuda/even/shape.h)
};

struct EvenWeight {
  const unsigned char* planes;
  const half_bits *suh, *svh;
  const float* bias;
  int group_end;  // groups of 64 outputs up to its end; of the last weight, no group reaches it
  int column;     // of y
};

// A turn is what a warp takes at once: some steps of 16 inputs of a group of 64 outputs. Turns are
// counted through all groups; a unit is the groups of 128 outputs, with an activation of gate and
// up.
struct EvenParams {
  int run, turns, all;                     // turns of a warp, of a group, in all
  int groups_log;                          // of the groups of a unit
  uint32_t per_run, per_block, per_turns;  // 2^32 / run, turns of a thread block, turns; rounded up
  int k_blocks;                            // of 128 inputs
  EvenWeight w[kLinearGroup];
  int rows;
  Rows x, y, residual;
  const float* norm_weight;
  float norm_eps, norm_offset;
  int bits, activation;
  Codebook codebook;
  uint32_t multiplier, increment;  // of a state, for 3inst and mcg
  int blocks;                      // thread blocks
  // 0: one row, whose inputs each thread block makes; or the fragments of inputs that a launch
  // before makes (gemv_input_cuda).
  int fragments;
  int input_bytes, sums_bytes, shared_bytes;  // the last: all dynamic shared memory
  const unsigned char* workspace;             // of gemv_input_cuda
  int weights;                                // in it
  uint32_t* exchange;  // [blocks][rows][kEvenExchange], zero before and after a launch
};
constexpr int kEvenExchange = 4 * 64;
constexpr int64_t kEvenMostRows = 32;  // that it is worth a try for; two launches

// The plan of a problem with `each` thread blocks a multiprocessor (0: built in); false if the
// kernel has no instance for it. Pointers count only for alignment. Pure arithmetic.
bool even_plan(const LinearCudaParams& problem, const EvenDevice& device, int each,
               EvenParams* plan);
// The rows of a launch for m of them: all, or as many as fit; 0: none do.
int even_rows(const LinearCudaParams& problem, const EvenDevice& device, int each);
EvenDevice even_device();  // the current one
Status even_cuda(const EvenParams& p, CudaStream stream);

}  // namespace exl3
