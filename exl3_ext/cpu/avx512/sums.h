// Sums of a strip of 16 columns, as the inner products keep them.
#pragma once
#include "cpu/avx512/states.h"
#include "cpu/linear_plan.h"

namespace exl3::avx512 {

// Sums of a block: lane 2i and 2i + 1 of left are parts of column i, of right of column 8 + i.
EXL3_STATIC __m512i initial_sums(const LinearBlockMeta& meta) {
  return _mm512_set1_epi64(static_cast<uint32_t>(meta.init));
}

// The 16 columns' totals and one block's sums.
EXL3_STATIC __m512 add_block(__m512 total, __m512i left, __m512i right,
                             const LinearBlockMeta& meta) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  const __m512i sums = _mm512_add_epi32(_mm512_permutex2var_epi32(left, even, right),
                                        _mm512_permutex2var_epi32(left, odd, right));
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(meta.scale), total);
}

// What the blocks of one row add to every output, in their order.
EXL3_STATIC float row_base(const LinearBlockMeta* meta, int64_t blocks) {
  float base = 0.0f;
  for (int64_t b = 0; b < blocks; ++b) base += meta[b].offset;
  return base;
}

// Four activations of a tile (of one e) in every 64-bit lane, next to the weights of t = 0..3.
EXL3_STATIC __m512i broadcast4(const int16_t* q) {
  int64_t four;
  __builtin_memcpy(&four, q, 8);
  return _mm512_set1_epi64(four);
}

}  // namespace exl3::avx512
