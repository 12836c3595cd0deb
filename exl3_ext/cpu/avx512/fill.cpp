#include "cpu/avx512/hadamard.h"
#include "cpu/avx512/linear.h"
#include "cpu/avx512/rows.h"
#include "cpu/table.h"

namespace exl3 {

void fill_avx512(KernelTable& t) {
  t.hadamard_rows = avx512::hadamard_rows;
  avx512::fill_rows(t);
  avx512::fill_linear(t);
  avx512::fill_attention(t);
}

}  // namespace exl3
