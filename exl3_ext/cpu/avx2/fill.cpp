#include "cpu/avx2/encode.h"
#include "cpu/avx2/hadamard.h"
#include "cpu/avx2/linear.h"
#include "cpu/avx2/rows.h"
#include "cpu/avx2/trellis.h"
#include "cpu/low_rank.h"
#include "cpu/table.h"

namespace exl3 {

void fill_avx2(KernelTable& t) {
  t.encode_step = avx2::encode_step;
  t.encode_coarse_step = avx2::encode_coarse_step;
  t.hadamard_rows = avx2::hadamard_rows;
  avx2::fill_linear(t);
  t.trellis_decode = avx2::trellis_decode;
  avx2::fill_rows(t);
  avx2::fill_attention(t);
  t.low_rank_inner = avx2::low_rank_inner;
  t.low_rank_block = avx2::low_rank_block;
}

}  // namespace exl3
