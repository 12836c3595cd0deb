// Thread-block clusters. Before compute capability 9.0 a cluster is one thread block.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace exl3::cuda {

static __device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

static __device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
static __device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Stores to the same place in the shared memory of another thread block of the cluster.
static __device__ __forceinline__ void store_remote(float* here, int rank, float v) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
      " st.shared::cluster.f32 [there], %2; }" ::"r"(shared_address(here)),
      "r"(rank), "f"(v)
      : "memory");
#else
  *here = v;
#endif
}
// A barrier that counts bytes, in this thread block's shared memory, for stores by `send_counted`.
// It opens once after `bytes` have come. Before others send, the cluster must have met
// (cluster_meet).
static __device__ __forceinline__ void counted_start(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  const uint32_t at = shared_address(barrier);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
#endif
}
static __device__ __forceinline__ void counted_wait(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred open; AGAIN_%=: mbarrier.try_wait.parity.shared::cta.b64 open, [%0], 0;"
      " @!open bra AGAIN_%=; }" ::"r"(shared_address(barrier))
      : "memory");
#endif
}

// All thread blocks of the cluster run and have made their barriers. Orders no other memory.
static __device__ __forceinline__ void cluster_meet_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Stores to the same place in thread block `rank` of the cluster and counts on its barrier.
static __device__ __forceinline__ void send_counted(float4* here, uint64_t* barrier, int rank,
                                                    const float4& v) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there, its; mapa.shared::cluster.u32 there, %0, %2;"
      " mapa.shared::cluster.u32 its, %1, %2;"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6},"
      " [its]; }" ::"r"(shared_address(here)),
      "r"(shared_address(barrier)), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
#endif
}
static __device__ __forceinline__ void send_counted(float2* here, uint64_t* barrier, int rank,
                                                    const float2& v) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there, its; mapa.shared::cluster.u32 there, %0, %2;"
      " mapa.shared::cluster.u32 its, %1, %2;"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3, %4}, [its]; }" ::
          "r"(shared_address(here)),
      "r"(shared_address(barrier)), "r"(rank), "f"(v.x), "f"(v.y)
      : "memory");
#endif
}

}  // namespace exl3::cuda
