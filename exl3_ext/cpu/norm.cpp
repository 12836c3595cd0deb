#include "exl3/norm.h"

#include "cpu/table.h"
#include "cpu/threads.h"

namespace exl3 {

Status rms_norm_cpu(const RmsNormParams& p) {
  if (p.dim < 1) return Status::kOk;
  const KernelTable& k = kernels();
  parallel_for(p.rows, 16384 / p.dim + 1,
               [&](int64_t begin, int64_t end, int) { k.rms_norm_rows(p, begin, end); });
  return Status::kOk;
}

}  // namespace exl3
