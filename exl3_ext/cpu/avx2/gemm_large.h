#pragma once
#include "exl3/gemm_large.h"

namespace exl3::avx2 {
void gemm_large_inputs(const GemmLargeParams& p, int64_t begin, int64_t end);
void gemm_large_strips(const GemmLargeParams& p, int64_t begin, int64_t end);
}  // namespace exl3::avx2
