#pragma once
#include "cpu/attention.h"

namespace exl3::generic {
void attention_task(const AttentionParams& p, const AttentionTask& t, float* partial,
                    float* scratch);
void attention_merge(const AttentionParams& p, const AttentionMerge& m, float* partial);
}  // namespace exl3::generic
