#include "cpu/table.h"

namespace exl3 {

void fill_amx(KernelTable&) {}

}  // namespace exl3
