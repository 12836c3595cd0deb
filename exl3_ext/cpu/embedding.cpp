#include "exl3/embedding.h"

#include "cpu/table.h"
#include "cpu/threads.h"

namespace exl3 {

Status embedding_cpu(const EmbeddingParams& p) {
  for (int64_t i = 0; i < p.rows; ++i) {
    if (p.ids[i] < 0 || p.ids[i] >= p.vocab) return Status::kOutOfRange;
  }
  if (p.dim < 1) return Status::kOk;
  const KernelTable& k = kernels();
  parallel_for(p.rows, 16384 / p.dim + 1,
               [&](int64_t begin, int64_t end, int) { k.embedding_rows(p, begin, end); });
  return Status::kOk;
}

}  // namespace exl3
