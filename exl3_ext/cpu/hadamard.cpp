#include "exl3/hadamard.h"

#include "cpu/table.h"
#include "cpu/threads.h"

namespace exl3 {

Status hadamard_cpu(const HadamardParams& p) {
  if (p.dim % kHadamardDim != 0) return Status::kBadArgument;
  const int64_t grain = 16384 / p.dim + 1;
  parallel_for(p.rows, grain,
               [&](int64_t begin, int64_t end, int) { kernels().hadamard_rows(p, begin, end); });
  return Status::kOk;
}

}  // namespace exl3
