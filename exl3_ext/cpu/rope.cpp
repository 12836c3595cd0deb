#include "exl3/rope.h"

#include "cpu/table.h"
#include "cpu/threads.h"

namespace exl3 {

Status rope_table_cpu(const RopeTableParams& p) {
  if (p.half < 1) return Status::kOk;
  const KernelTable& k = kernels();
  parallel_for(p.rows, 512 / p.half + 1,
               [&](int64_t begin, int64_t end, int) { k.rope_table_rows(p, begin, end); });
  return Status::kOk;
}

Status rope_append_cpu(const RopeAppendParams& p) {
  if (p.slots) {
    for (int64_t i = 0; i < p.rows; ++i) {
      if (p.slots[i] >= p.total_slots) return Status::kOutOfRange;
    }
  }
  const int64_t width = static_cast<int64_t>(p.q_heads + 2 * p.kv_heads) * p.head_dim;
  const KernelTable& k = kernels();
  parallel_for(p.rows, 16384 / (width + 1) + 1,
               [&](int64_t begin, int64_t end, int) { k.rope_append_rows(p, begin, end); });
  return Status::kOk;
}

}  // namespace exl3
