// The exact float16 weight of a state.
#pragma once
#include <cuda_fp16.h>

#include "exl3/codebook.h"

namespace exl3::cuda {

template <Codebook kCodebook>
static __device__ __forceinline__ __half value_of(uint32_t state) {
  if constexpr (kCodebook == Codebook::kMul1) {
    const __half sum = __uint2half_rn(kMul1Bias + __dp4a(state * kMul1Mul, 0x01010101u, 0u));
    return __hfma(sum, __ushort_as_half(kMul1ScaleBits), __ushort_as_half(kMul1OffsetBits));
  } else {
    const uint32_t pair = half_pair(kCodebook, state);
    return __hadd(__ushort_as_half(static_cast<unsigned short>(pair & 0xFFFFu)),
                  __ushort_as_half(static_cast<unsigned short>(pair >> 16)));
  }
}

}  // namespace exl3::cuda
