// Enough of CUDA to run a kernel's source on a CPU, one thread block at a time.
//
// Every thread is a context of its own (block.cpp). Warps run one after the other, in another order
// after each barrier; lanes of a warp meet at shuffles and votes. A sum that leaves its range,
// where the kernel counts on it not to, is noted in `overflowed`.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __noinline__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

namespace on_cpu {

constexpr int kThreads = 512;

extern int current;  // thread that runs
extern int offered[kThreads];
extern bool overflowed;
struct Size {
  int x = 1, y = 1, z = 1;
};
extern Size block, grid;
inline Size block_size{kThreads, 1, 1};

void run_block(void (*kernel)(), unsigned seed);
void meet_block();
void meet_warp();

struct ThreadIndex {
  struct {
    operator int() const { return current; }
  } x;
};

template <class T>
T kept(long long value) {
  if (value != static_cast<T>(value)) overflowed = true;
  return static_cast<T>(value);
}

// What `get` makes of the values that the warp's lanes offer.
template <class Get>
auto exchange(int value, Get get) {
  offered[current] = value;
  meet_warp();
  const auto result = get(offered + current / 32 * 32);
  meet_warp();
  return result;
}

}  // namespace on_cpu

static on_cpu::ThreadIndex threadIdx;
#define blockIdx on_cpu::block
#define gridDim on_cpu::grid
#define blockDim on_cpu::block_size

using cudaStream_t = void*;
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline uint32_t max(uint32_t a, int b) { return max(a, static_cast<uint32_t>(b)); }

inline void __syncthreads() { on_cpu::meet_block(); }
inline void __syncwarp() { on_cpu::meet_warp(); }
inline int __shfl_sync(unsigned, int value, int lane) {
  return on_cpu::exchange(value, [=](const int* of) { return of[lane & 31]; });
}
inline int __shfl_xor_sync(unsigned, int value, int mask) {
  return on_cpu::exchange(value, [=](const int* of) { return of[on_cpu::current % 32 ^ mask]; });
}
inline unsigned __ballot_sync(unsigned, bool value) {
  return on_cpu::exchange(value, [](const int* of) {
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) result |= static_cast<unsigned>(of[i]) << i;
    return result;
  });
}

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T atomicMin(T* p, T value) {
  const T old = *p;
  *p = value < old ? value : old;
  return old;
}
template <class T>
T atomicAdd(T* p, T value) {
  const T old = *p;
  *p += value;
  return old;
}

inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline int __float2int_rn(float x) { return static_cast<int>(std::lrint(x)); }
inline int __float2int_rd(float x) { return static_cast<int>(std::floor(x)); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t pattern) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= (both >> 8 * (pattern >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int shift) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline int __dp2a_lo(int a, int b, int c) {
  return c + static_cast<int16_t>(a) * static_cast<int8_t>(b) +
         (a >> 16) * static_cast<int8_t>(b >> 8);
}
inline int __viaddmin_s32(int a, int b, int c) {
  return min(on_cpu::kept<int32_t>(static_cast<long long>(a) + b), c);
}

// By halves of 16 bits.
template <class Of>
uint32_t by_halves(uint32_t a, uint32_t b, uint32_t c, Of of) {
  const auto half = [&](int at) {
    const int result = of(static_cast<int16_t>(a >> at), static_cast<int16_t>(b >> at),
                          static_cast<int16_t>(c >> at));
    return static_cast<uint32_t>(static_cast<uint16_t>(result)) << at;
  };
  return half(0) | half(16);
}
inline uint32_t __vadd2(uint32_t a, uint32_t b) {
  return by_halves(a, b, 0, [](int x, int y, int) { return on_cpu::kept<int16_t>(x + y); });
}
inline uint32_t __vsub2(uint32_t a, uint32_t b) {
  return by_halves(a, b, 0, [](int x, int y, int) { return x - y; });
}
inline uint32_t __vminu2(uint32_t a, uint32_t b) {
  return by_halves(a, b, 0, [](int x, int y, int) { return min(x & 0xFFFF, y & 0xFFFF); });
}
inline uint32_t __viaddmin_s16x2(uint32_t a, uint32_t b, uint32_t c) {
  return by_halves(a, b, c,
                   [](int x, int y, int z) { return min(on_cpu::kept<int16_t>(x + y), z); });
}
