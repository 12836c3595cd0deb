#pragma once
#include "exl3/encode.h"

namespace exl3::generic {
void encode_tiles(const EncodeParams& p, int64_t begin, int64_t end, unsigned char* workspace);
}
