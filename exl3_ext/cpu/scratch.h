// Memory for one launch or one task: buffers of the calling thread that only grow, so that a step
// in the steady state allocates nothing and concurrent callers never share.
#pragma once
#include <cstddef>

namespace exl3 {

enum class Scratch : int { kTask = 0, kPartial = 1 };
constexpr int kScratchSlots = 2;

// At least `bytes`, aligned to 64, contents undefined; valid until this thread asks for the same
// slot again. Null when there is no memory.
void* scratch(Scratch slot, size_t bytes);

}  // namespace exl3
