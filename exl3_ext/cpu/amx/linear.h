#pragma once
#include "cpu/linear_plan.h"

namespace exl3::amx {
void linear_tiles(const LinearStrips& s);
void linear_many(const LinearStrips& s);
}  // namespace exl3::amx
