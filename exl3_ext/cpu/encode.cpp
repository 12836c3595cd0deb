#include "exl3/encode.h"

#include "cpu/table.h"
#include "cpu/threads.h"

namespace exl3 {

int64_t encode_workspace_bytes(int bits) {
  return (int64_t{kTileNumel} + 1) * (kStates >> bits) * sizeof(float) + 2048;
}

Status encode_cpu(const EncodeParams& p) {
  if (p.bits < 1 || p.bits > 8 || num_threads() > p.threads) return Status::kBadArgument;
  const int64_t stride = encode_workspace_bytes(p.bits);
  parallel_for(p.n_tiles, 1, [&](int64_t begin, int64_t end, int thread) {
    kernels().encode_tiles(p, begin, end, p.workspace + thread * stride);
  });
  return Status::kOk;
}

}  // namespace exl3
