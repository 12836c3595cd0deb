// Products of a warp on tensor cores, c += a @ b. With g = lane / 4 and t = lane % 4:
//
//          a0 .. a3 (rows g, g+8, g, g+8)     b0, b1 (column g)    c0 .. c3
//   u8s8   bytes 4t.. (a0, a1), 16+4t..       rows 4t.., 16+4t..   (g, 2t), (g, 2t+1), then row g+8
//   f16    halves 2t, 2t+1 (a0, a1), 8+2t..   rows 2t.., 8+2t..    the same
//
// Before compute capability 8.0 in the pieces that it has: 8x8x16 of bytes, 16x8x8 of halves.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace exl3::cuda {

#if __CUDA_ARCH__ < 800
static __device__ __forceinline__ void mma_u8s8_8x8x16(int& c0, int& c1, uint32_t a, uint32_t b) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+r"(c0), "+r"(c1)
      : "r"(a), "r"(b));
}
static __device__ __forceinline__ void mma_f16_16x8x8(float (&c)[4], uint32_t a0, uint32_t a1,
                                                      uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}
#endif

// 16x32 unsigned bytes by 32x8 signed bytes.
static __device__ __forceinline__ void mma_u8s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                                uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  mma_u8s8_8x8x16(c[0], c[1], a0, b0);
  mma_u8s8_8x8x16(c[2], c[3], a1, b0);
  mma_u8s8_8x8x16(c[0], c[1], a2, b1);
  mma_u8s8_8x8x16(c[2], c[3], a3, b1);
#endif
}

// 16x16 by 16x8 float16, sums in float32.
static __device__ __forceinline__ void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                               uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  mma_f16_16x8x8(c, a0, a1, b0);
  mma_f16_16x8x8(c, a2, a3, b1);
#endif
}

}  // namespace exl3::cuda
