#pragma once
#include "cpu/linear_plan.h"
#include "cpu/table.h"

namespace exl3::avx2 {
void fill_linear(KernelTable& t);
void linear_words(const LinearStrips& s);
}  // namespace exl3::avx2
