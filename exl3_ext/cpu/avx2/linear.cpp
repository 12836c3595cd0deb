// Linear layer: prologue and epilogue of this level, and its entries in the table.
#include "cpu/avx2/linear.h"

#include "cpu/avx2/hadamard_inl.h"
#include "cpu/avx2/math.h"
#include "cpu/avx2/quantise.h"
// After the headers of the level.
#include "cpu/simd/linear.h"

namespace exl3::avx2 {

void fill_linear(KernelTable& t) {
  t.linear_prologue = linear_prologue;
  t.linear_words = linear_words;
  t.linear_epilogue = linear_epilogue;
}

}  // namespace exl3::avx2
