#define EXL3_TILE_ROWS 4
#include "cpu/avx512/vec.h"
// After vec.h, which defines the vector that it is written in.
#include "cpu/simd/low_rank.h"
