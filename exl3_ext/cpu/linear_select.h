// Which kernel runs a linear layer, and how finely its activations are quantised.
#pragma once
#include <cstdint>

#include "cpu/isa.h"
#include "exl3/types.h"

namespace exl3 {

enum class LinearKernel : int {
  kWords,  // 16-bit weights times 16-bit activations; every codebook and level
  kBytes,  // AVX-512 VNNI on the product's bytes, 8-bit activations; mul1, up to 4 bits, one row
  kTiles,  // AMX on the product's bytes, 8-bit activations or two planes of them; mul1, some rows
  kMany,   // AMX on bytes of the weights as 16-bit integers; every codebook, many rows
};

struct LinearChoice {
  LinearKernel kernel;
  int q_max;   // largest magnitude of a quantised activation
  int planes;  // of bytes that it takes
};

// A pure function. q_max depends on the weight alone, never on m or the level, and all kernels sum
// the same integers: so a row's result does not depend on the rows that come with it.
LinearChoice linear_select(Isa isa, Codebook codebook, int bits, int64_t m);

}  // namespace exl3
