#include "cpu/avx512/encode.h"
#include "cpu/avx512/hadamard.h"
#include "cpu/avx512/linear.h"
#include "cpu/avx512/rows.h"
#include "cpu/avx512/trellis.h"
#include "cpu/low_rank.h"
#include "cpu/table.h"

namespace exl3 {

void fill_avx512(KernelTable& t) {
  t.encode_step = avx512::encode_step;
  t.encode_coarse_step = avx512::encode_coarse_step;
  t.hadamard_rows = avx512::hadamard_rows;
  t.trellis_decode = avx512::trellis_decode;
  avx512::fill_rows(t);
  avx512::fill_linear(t);
  avx512::fill_attention(t);
  t.low_rank_inner = avx512::low_rank_inner;
  t.low_rank_block = avx512::low_rank_block;
}

}  // namespace exl3
