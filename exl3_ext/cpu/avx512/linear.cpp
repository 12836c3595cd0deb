// Linear layer: prologue and epilogue of this level, and its entries in the table.
#include "cpu/avx512/linear.h"

#include "cpu/avx512/hadamard_inl.h"
#include "cpu/avx512/math.h"
#include "cpu/avx512/quantise.h"
// After the headers of the level.
#include "cpu/simd/linear.h"

namespace exl3::avx512 {

void fill_linear(KernelTable& t) {
  t.linear_prologue = linear_prologue;
  t.linear_words = linear_words;
  t.linear_bytes = linear_bytes;
  t.linear_epilogue = linear_epilogue;
}

}  // namespace exl3::avx512
