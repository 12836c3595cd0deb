#include "cpu/generic/hadamard.h"
#include "cpu/table.h"

namespace exl3 {

void fill_generic(KernelTable& t) { t.hadamard_rows = generic::hadamard_rows; }

}  // namespace exl3
