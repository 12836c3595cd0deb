// Asynchronous copies from global to shared memory. Before compute capability 8.0 a copy is a load
// and a store, and there is nothing to wait for.
#pragma once
#include "cuda/common/cluster.cuh"

namespace exl3::cuda {

template <int kBytes>
struct CopyWord;
template <>
struct CopyWord<4> {
  using type = uint32_t;
};
template <>
struct CopyWord<8> {
  using type = uint2;
};
template <>
struct CopyWord<16> {
  using type = uint4;
};

// kBytes (4, 8 or 16), seen by this thread after its copy_wait. Zeros if not `valid`; `from` is not
// read then.
template <int kBytes>
static __device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  const int size = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(size)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
                 "l"(from), "n"(kBytes), "r"(size)
                 : "memory");
  }
#else
  using Word = typename CopyWord<kBytes>::type;
  *static_cast<Word*>(to) = valid ? *static_cast<const Word*>(from) : Word{};
#endif
}

template <int kBytes>
static __device__ __forceinline__ void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                 "n"(kBytes)
                 : "memory");
  }
#else
  copy_async<kBytes>(to, from, true);
#endif
}

// Ends a group of copies; copy_wait<n> waits for all groups but the last n.
static __device__ __forceinline__ void copy_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending>
static __device__ __forceinline__ void copy_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace exl3::cuda
