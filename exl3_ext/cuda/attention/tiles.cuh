// Fragments of products of 16x16 by 16x8 float16.
#pragma once
#include "cuda/common/copy.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/vector.cuh"

namespace exl3::cuda {

// Four 8x8 matrices of float16; lane l gives the address of row l % 8 of matrix l / 8.
static __device__ __forceinline__ void load_matrices(unsigned (&r)[4], const __half* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

static __device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4],
                                                                const __half* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

static __device__ __forceinline__ void multiply_16x8x16(float (&c)[4], const unsigned (&a)[4],
                                                        unsigned b0, unsigned b1) {
  mma_f16(c, a[0], a[1], a[2], a[3], b0, b1);
}

static __device__ __forceinline__ unsigned pack_halves(float low, float high) {
  const __half2 h = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&h);
}

static __device__ __forceinline__ float exp2_fast(float v) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(v));
  return y;
}

}  // namespace exl3::cuda
