#pragma once
#include "cpu/encode_step.h"

namespace exl3::generic {
void encode_step(EncodeStep& s);
void encode_coarse_step(EncodeCoarseStep& s);
}  // namespace exl3::generic
