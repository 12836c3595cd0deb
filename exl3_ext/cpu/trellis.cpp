#include "exl3/trellis.h"

#include "cpu/table.h"
#include "cpu/threads.h"

namespace exl3 {
namespace {

constexpr bool good_bits(int bits) { return bits >= 1 && bits <= 8; }
constexpr int64_t kGrainTiles = 64;

}  // namespace

Status trellis_pack_cpu(const TrellisPackParams& p) {
  if (!good_bits(p.bits)) return Status::kBadArgument;
  parallel_for(p.tiles, kGrainTiles,
               [&](int64_t begin, int64_t end, int) { kernels().trellis_pack(p, begin, end); });
  return Status::kOk;
}

Status trellis_unpack_cpu(const TrellisPackParams& p) {
  if (!good_bits(p.bits)) return Status::kBadArgument;
  parallel_for(p.tiles, kGrainTiles,
               [&](int64_t begin, int64_t end, int) { kernels().trellis_unpack(p, begin, end); });
  return Status::kOk;
}

Status trellis_decode_cpu(const TrellisDecodeParams& p) {
  if (!good_bits(p.bits) || p.k % kTileDim || p.n % kTileDim) return Status::kBadArgument;
  const int64_t columns = p.n / kTileDim;
  if (columns == 0) return Status::kOk;
  parallel_for(p.batch * (p.k / kTileDim), kGrainTiles / columns + 1,
               [&](int64_t begin, int64_t end, int) { kernels().trellis_decode(p, begin, end); });
  return Status::kOk;
}

Status trellis_prepare_cpu(const TrellisPlanesParams& p) {
  if (!good_bits(p.bits)) return Status::kBadArgument;
  parallel_for(p.batch * p.n_tiles, kGrainTiles / (p.k_tiles + 1) + 1,
               [&](int64_t begin, int64_t end, int) { kernels().trellis_prepare(p, begin, end); });
  return Status::kOk;
}

Status trellis_restore_cpu(const TrellisPlanesParams& p) {
  if (!good_bits(p.bits)) return Status::kBadArgument;
  parallel_for(p.batch * p.n_tiles, kGrainTiles / (p.k_tiles + 1) + 1,
               [&](int64_t begin, int64_t end, int) { kernels().trellis_restore(p, begin, end); });
  return Status::kOk;
}

}  // namespace exl3
