#include "cpu/avx512/hadamard.h"
#include "cpu/avx512/linear.h"
#include "cpu/avx512/rows.h"
#include "cpu/table.h"

namespace exl3 {

void fill_avx512(KernelTable& t) {
  t.hadamard_rows = avx512::hadamard_rows;
  avx512::fill_rows(t);
  t.linear_prologue = avx512::linear_prologue;
  t.linear_words = avx512::linear_words;
  t.linear_bytes = avx512::linear_bytes;
  t.linear_epilogue = avx512::linear_epilogue;
}

}  // namespace exl3
