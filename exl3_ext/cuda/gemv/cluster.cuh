// Asynchronous copies and thread-block clusters. Before compute capability 9.0 a cluster is one
// thread block.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace exl3::cuda {

static __device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// kBytes (4, 8 or 16) from global to shared memory, seen by this thread after its copy_wait.
template <int kBytes>
static __device__ __forceinline__ void copy_async(void* to, const void* from) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                 "n"(kBytes)
                 : "memory");
  }
}
static __device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
static __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
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

}  // namespace exl3::cuda
