#pragma once
#include "exl3/hadamard.h"

namespace exl3::avx2 {
void hadamard_rows(const HadamardParams& p, int64_t begin, int64_t end);
}
