#include "cpu/table.h"

namespace exl3 {

void fill_avx2(KernelTable&) {}

}  // namespace exl3
