#pragma once
#include "cpu/table.h"

namespace exl3::avx2 {
void fill_rows(KernelTable& t);
void fill_attention(KernelTable& t);
}  // namespace exl3::avx2
