#pragma once
#include "cpu/linear_plan.h"

namespace exl3::generic {
void linear_prologue(const LinearParams& p, const LinearWeightPlan& w, int weight, int64_t row,
                     int64_t begin, int64_t end);
void linear_words(const LinearStrips& s);
void linear_epilogue(const LinearParams& p, const LinearPlan& plan, int weight, int64_t block);
}  // namespace exl3::generic
