#include "cpu/table.h"

namespace exl3 {

void fill_avx512(KernelTable&) {}

}  // namespace exl3
