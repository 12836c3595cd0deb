#include "cpu/avx2/rows.h"

#include "cpu/avx2/math.h"
// After math.h, which defines the vector that it is written in.
#include "cpu/simd/rows.h"

namespace exl3::avx2 {

void fill_rows(KernelTable& t) {
  t.rms_norm_rows = rms_norm_rows;
  t.gated_activation_span = gated_activation_span;
  t.embedding_rows = embedding_rows;
  t.argmax_rows = argmax_rows;
  t.rope_append_rows = rope_append_rows;
}

}  // namespace exl3::avx2
