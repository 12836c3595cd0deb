#include "cpu/generic/attention.h"
#include "cpu/generic/encode.h"
#include "cpu/generic/hadamard.h"
#include "cpu/generic/linear.h"
#include "cpu/generic/rows.h"
#include "cpu/generic/trellis.h"
#include "cpu/low_rank.h"
#include "cpu/table.h"

namespace exl3 {

void fill_generic(KernelTable& t) {
  t.encode_step = generic::encode_step;
  t.encode_coarse_step = generic::encode_coarse_step;
  t.hadamard_rows = generic::hadamard_rows;
  t.trellis_pack = generic::trellis_pack;
  t.trellis_unpack = generic::trellis_unpack;
  t.trellis_decode = generic::trellis_decode;
  t.trellis_prepare = generic::trellis_prepare;
  t.trellis_restore = generic::trellis_restore;
  t.linear_prologue = generic::linear_prologue;
  t.linear_words = generic::linear_words;
  t.linear_epilogue = generic::linear_epilogue;
  t.rms_norm_rows = generic::rms_norm_rows;
  t.gated_activation_span = generic::gated_activation_span;
  t.embedding_rows = generic::embedding_rows;
  t.argmax_rows = generic::argmax_rows;
  t.rope_table_rows = generic::rope_table_rows;
  t.rope_append_rows = generic::rope_append_rows;
  t.attention_task = generic::attention_task;
  t.attention_merge = generic::attention_merge;
  t.low_rank_inner = generic::low_rank_inner;
  t.low_rank_block = generic::low_rank_block;
}

}  // namespace exl3
