// Sizes that the kernel and its plan share.
#pragma once
#include "cuda/gemv/shape.h"
#include "exl3/gemv_even.h"

namespace exl3::cuda {

constexpr int kEvenWarps = 8, kEvenThreads = kEvenWarps * 32;

// Steps of 16 inputs in a turn, and the turns in flight in a warp.
constexpr int even_steps(int bits) { return bits <= 4 ? 4 : 2; }
constexpr int even_turns_of_block(int bits) { return kHadamardDim / kTileDim / even_steps(bits); }
constexpr int even_turn_bytes(int bits) { return even_steps(bits) * 128 * bits; }
constexpr int even_depth(int bits) {
  const int depth = 5120 / even_turn_bytes(bits);
  return depth < 2 ? 2 : depth > 8 ? 8 : depth;
}

// Bytes of a job (a block of 128 inputs for one weight): first four floats a lane, at last the
// activations, eight words a step: a lane's words of a turn side by side.
constexpr int kEvenJobBytes = 512;
constexpr int even_turn_words(int bits) { return 8 * even_steps(bits); }
// Of several rows, whose activations take room beside each turn.
constexpr int even_rows_depth(int bits) { return even_depth(bits) < 3 ? even_depth(bits) : 3; }
// Bytes of the activations of a turn of several rows: those of its steps as gemv_input_cuda leaves
// them. A warp has one turn more of them than of weights: they are read until the turn's end.
constexpr int even_rows_bytes(bool integer, int fragments, int bits) {
  return even_steps(bits) * gemv_step_bytes(integer, fragments);
}

// Shared memory of a thread block that is not dynamic, and what the device takes.
constexpr int kEvenReservedBytes = 2176;

// Compute capability 9.0: two launches, one with a norm and one without, fit one multiprocessor
// together, but no two with a norm, by their shared memory, nor two without, by their registers.
// Since a model's launches take turns, each has one thread block on every multiprocessor, beside
// one of the launch before.
constexpr int kNormRegisters = 96, kPlainRegisters = 160;
constexpr int kNormSharedBytes = 115 * 1024;

}  // namespace exl3::cuda
