#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "cuda/common/device.h"

namespace exl3 {
namespace {

constexpr int kDevices = 32;
constexpr int kNoCap = 1 << 30;
std::atomic<int> g_cap{kNoCap};

// Compiled for what the library is compiled for.
__global__ void probe_kernel() {}

int current_device() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && device < kDevices ? device : 0;
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, name, device);
  return value;
}

int find_capability(int device) {
  cudaFuncAttributes found{};
  if (cudaFuncGetAttributes(&found, probe_kernel) != cudaSuccess) {
    cudaGetLastError();  // an answer, no error
    return 0;
  }
  const int has = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                  attribute(cudaDevAttrComputeCapabilityMinor, device);
  return std::min({has, found.ptxVersion, g_cap.load()});
}

// CUDA C++ Programming Guide, table of technical specifications.
SharedMemory shared_memory_of(int capability) {
  constexpr int kKiB = 1024;
  if (capability < 80) return {64 * kKiB, 64 * kKiB};
  if (capability < 86 || capability == 87) return {163 * kKiB, 164 * kKiB};
  if (capability < 90 || capability >= 120) return {99 * kKiB, 100 * kKiB};
  return {227 * kKiB, 228 * kKiB};
}

}  // namespace

int capability() {
  static std::atomic<int> known[kDevices];  // 1 + what was found; 0: not looked for
  const int device = current_device();
  if (known[device].load() == 0) known[device].store(1 + find_capability(device));
  return known[device].load() - 1;
}

SharedMemory shared_memory() {
  const int device = current_device();
  const SharedMemory has{attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                         attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device)};
  if (g_cap.load() == kNoCap) return has;
  const SharedMemory cap = shared_memory_of(g_cap.load());
  return {std::min(has.block, cap.block), std::min(has.processor, cap.processor)};
}

void set_capability_cap(int cap) { g_cap.store(cap); }

}  // namespace exl3
