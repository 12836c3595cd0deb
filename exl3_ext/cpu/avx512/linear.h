#pragma once
#include "cpu/linear_plan.h"
#include "cpu/table.h"

namespace exl3::avx512 {
void fill_linear(KernelTable& t);
void linear_words(const LinearStrips& s);
void linear_words_fused(const LinearStrips& s);  // mul1, few rows
void linear_bytes(const LinearStrips& s);
}  // namespace exl3::avx512
