#pragma once
#include "exl3/gemm_large.h"

namespace exl3::generic {
void gemm_large_strips(const GemmLargeParams& p, int64_t begin, int64_t end);
}
