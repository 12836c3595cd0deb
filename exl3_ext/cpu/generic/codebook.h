#pragma once
#include "exl3/types.h"

namespace exl3::generic {

// The 65536 values of a codebook as float16 bits, exactly as the format defines them. Made at the
// first call, which is safe from any thread.
const half_bits* codebook_values(Codebook codebook);

}  // namespace exl3::generic
