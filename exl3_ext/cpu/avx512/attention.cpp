#include "cpu/avx512/kv_planes.h"
#include "cpu/avx512/math.h"
#include "cpu/avx512/rows.h"
// After math.h, which defines the vector that it is written in.
#include "cpu/simd/attention.h"

namespace exl3::avx512 {

void fill_attention(KernelTable& t) {
  t.attention_task = attention_task;
  t.attention_merge = attention_merge;
}

}  // namespace exl3::avx512
