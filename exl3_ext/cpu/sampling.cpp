#include "exl3/sampling.h"

#include "cpu/table.h"
#include "cpu/threads.h"

namespace exl3 {

Status argmax_cpu(const ArgmaxParams& p) {
  if (p.valid < 1) return Status::kBadArgument;
  const KernelTable& k = kernels();
  parallel_for(p.rows, 65536 / p.valid + 1,
               [&](int64_t begin, int64_t end, int) { k.argmax_rows(p, begin, end); });
  return Status::kOk;
}

}  // namespace exl3
