#pragma once
#include "exl3/trellis.h"

namespace exl3::generic {

void trellis_pack(const TrellisPackParams& p, int64_t begin, int64_t end);
void trellis_unpack(const TrellisPackParams& p, int64_t begin, int64_t end);
void trellis_decode(const TrellisDecodeParams& p, int64_t begin, int64_t end);
void trellis_prepare(const TrellisPlanesParams& p, int64_t begin, int64_t end);
void trellis_restore(const TrellisPlanesParams& p, int64_t begin, int64_t end);

// The 256 states of one tile of lane planes, in position order.
void plane_states(const uint16_t* tile, int bits, uint16_t* states);

}  // namespace exl3::generic
