// Products of a warpgroup (wgmma), barriers in shared memory that count bytes (mbarrier) and bulk
// copies: compute capability 9.0, target sm_90a only.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/cluster.cuh"

namespace exl3::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Registers of products in flight must not be touched until they are complete.
static __device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
static __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Matrix B of float16 rows of 64 inputs, 128 bytes, in shared memory: 16-byte unit u of row r
// stands at u ^ (r mod 8). `address` is a multiple of 1024. The low word of its descriptor; each
// step of 16 inputs adds 2.
static __device__ __forceinline__ uint32_t wgmma_matrix(uint32_t address) {
  return (1u << 16) | ((address & 0x3FFFF) >> 4);
}
// The high word: swizzle of 128 bytes, eight rows 1024 bytes from the next.
constexpr uint32_t kMatrixHigh = (1u << 30) | (1024 / 16);

#define EXL3_ACC8(i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])

// d (64 outputs, kRows rows) += a (64 outputs, 16 inputs) @ b. A warp of the warpgroup has 16
// outputs; lane t has outputs t/4 and t/4 + 8, and of each eight rows 2*(t%4) and the next.
template <int kRows>
static __device__ __forceinline__ void wgmma(float (&d)[kRows / 2], const uint32_t (&a)[4],
                                             uint32_t b) {
  if constexpr (kRows == 16) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 m; setp.ne.b32 p, 1, 0; mov.b64 m, {%12, %13};"
        " wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, m, p, 1, 1, 0; }"
        : EXL3_ACC8(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kMatrixHigh));
  } else if constexpr (kRows == 32) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 m; setp.ne.b32 p, 1, 0; mov.b64 m, {%20, %21};"
        " wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, m, p, 1, 1, 0; }"
        : EXL3_ACC8(0), EXL3_ACC8(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kMatrixHigh));
  } else if constexpr (kRows == 64) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 m; setp.ne.b32 p, 1, 0; mov.b64 m, {%36, %37};"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, m, p, 1, 1, 0; }"
        : EXL3_ACC8(0), EXL3_ACC8(8), EXL3_ACC8(16), EXL3_ACC8(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kMatrixHigh));
  } else if constexpr (kRows == 128) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 m; setp.ne.b32 p, 1, 0; mov.b64 m, {%68, %69};"
        " wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, m, p, 1, 1, 0; }"
        : EXL3_ACC8(0), EXL3_ACC8(8), EXL3_ACC8(16), EXL3_ACC8(24), EXL3_ACC8(32), EXL3_ACC8(40),
          EXL3_ACC8(48), EXL3_ACC8(56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kMatrixHigh));
  }
}

#undef EXL3_ACC8

#endif

// Barriers are addresses in shared memory.
static __device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase wait for `bytes` of copies too.
static __device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// `bytes`, a multiple of 16, from global to shared memory; they count on the barrier.
static __device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes,
                                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace exl3::cuda
