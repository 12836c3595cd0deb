#include "cpu/amx/gemm_large.h"
#include "cpu/amx/linear.h"
#include "cpu/table.h"

namespace exl3 {

void fill_amx(KernelTable& t) {
  t.linear_tiles = amx::linear_tiles;
  t.linear_many = amx::linear_many;
  t.gemm_large_inputs = amx::gemm_large_inputs;
  t.gemm_large_strips = amx::gemm_large_strips;
}

}  // namespace exl3
