#pragma once
#include "exl3/trellis.h"

namespace exl3::avx512 {
void trellis_decode(const TrellisDecodeParams& p, int64_t begin, int64_t end);
}
