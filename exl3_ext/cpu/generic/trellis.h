#pragma once
#include "exl3/trellis.h"

namespace exl3::generic {

void trellis_pack(const TrellisPackParams& p, int64_t begin, int64_t end);
void trellis_unpack(const TrellisPackParams& p, int64_t begin, int64_t end);
void trellis_decode(const TrellisDecodeParams& p, int64_t begin, int64_t end);
void trellis_prepare(const TrellisPlanesParams& p, int64_t begin, int64_t end);
void trellis_restore(const TrellisPlanesParams& p, int64_t begin, int64_t end);

// Where byte i of a tile of lane planes lies in the tile as stored in files: 32*bits entries.
const uint8_t* plane_order(int bits);

// The 256 states of one tile of lane planes, in position order.
void plane_states(const uint16_t* tile, int bits, uint16_t* states);

}  // namespace exl3::generic
