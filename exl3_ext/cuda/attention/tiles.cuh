// Fragments of mma.m16n8k16 and asynchronous copies, for sm_80 on.
#pragma once
#include "cuda/common/cluster.cuh"
#include "cuda/common/vector.cuh"

namespace exl3::cuda {

// 16 bytes to shared memory; zeros if not `valid` (nothing is read then).
static __device__ __forceinline__ void copy16(void* to, const void* from, bool valid) {
  const int size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)),
               "l"(from), "r"(size));
}

static __device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;\n"); }

template <int kPending>
static __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending));
}

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
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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
