// Memory that launches find zero and leave zero.
#pragma once
#include <cstdint>

#include "bind/cuda/guard.h"

namespace exl3::bind {

// `words` of one device and stream, made once and never freed: a captured step keeps their address.
// Steps captured on one stream must not run at once.
uint32_t* zeroed_words(const Tensor& near, const CudaLaunch& launch, int64_t words);

}  // namespace exl3::bind
