#include "cpu/avx2/hadamard.h"
#include "cpu/avx2/rows.h"
#include "cpu/table.h"

namespace exl3 {

void fill_avx2(KernelTable& t) {
  t.hadamard_rows = avx2::hadamard_rows;
  avx2::fill_rows(t);
  avx2::fill_attention(t);
}

}  // namespace exl3
