#define EXL3_TILE_ROWS 2
#include "cpu/avx2/vec.h"
// After vec.h, which defines the vector that it is written in.
#include "cpu/simd/low_rank.h"
