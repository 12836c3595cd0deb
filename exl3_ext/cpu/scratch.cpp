#include "cpu/scratch.h"

#include <cstdlib>

namespace exl3 {
namespace {

struct Buffers {
  void* at[kScratchSlots] = {};
  size_t bytes[kScratchSlots] = {};
  ~Buffers() {
    for (void* p : at) std::free(p);
  }
};

thread_local Buffers t_buffers;

}  // namespace

void* scratch(Scratch slot, size_t bytes) {
  const int i = static_cast<int>(slot);
  if (t_buffers.bytes[i] >= bytes && t_buffers.at[i]) return t_buffers.at[i];
  std::free(t_buffers.at[i]);
  const size_t rounded = (bytes + bytes / 2 + 4096) / 4096 * 4096;
  t_buffers.at[i] = std::aligned_alloc(64, rounded);
  t_buffers.bytes[i] = t_buffers.at[i] ? rounded : 0;
  return t_buffers.at[i];
}

}  // namespace exl3
