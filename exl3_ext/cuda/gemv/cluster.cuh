// Asynchronous copies.
#pragma once
#include "cuda/common/cluster.cuh"

namespace exl3::cuda {

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

}  // namespace exl3::cuda
