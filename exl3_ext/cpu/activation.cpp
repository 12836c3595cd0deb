#include "exl3/activation.h"

#include "cpu/table.h"
#include "cpu/threads.h"

namespace exl3 {

Status gated_activation_cpu(const GatedActivationParams& p) {
  const KernelTable& k = kernels();
  parallel_for(p.rows * p.dim, 8192,
               [&](int64_t begin, int64_t end, int) { k.gated_activation_span(p, begin, end); });
  return Status::kOk;
}

}  // namespace exl3
