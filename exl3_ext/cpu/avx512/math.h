// Vector exp, silu, gelu and their like at this level: v... functions of cpu/simd/math.h.
#pragma once
#include "cpu/avx512/vec.h"
// After vec.h, which defines the vector that it is written in.
#include "cpu/simd/math.h"
