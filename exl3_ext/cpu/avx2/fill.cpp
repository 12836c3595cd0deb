#include "cpu/avx2/encode.h"
#include "cpu/avx2/gemm_large.h"
#include "cpu/avx2/hadamard.h"
#include "cpu/avx2/linear.h"
#include "cpu/avx2/rows.h"
#include "cpu/avx2/trellis.h"
#include "cpu/table.h"

namespace exl3 {

void fill_avx2(KernelTable& t) {
  t.encode_step = avx2::encode_step;
  t.hadamard_rows = avx2::hadamard_rows;
  avx2::fill_linear(t);
  t.trellis_decode = avx2::trellis_decode;
  avx2::fill_rows(t);
  avx2::fill_attention(t);
  t.gemm_large_inputs = avx2::gemm_large_inputs;
  t.gemm_large_strips = avx2::gemm_large_strips;
}

}  // namespace exl3
