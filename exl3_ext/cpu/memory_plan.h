// Where the temporary tensors of a recorded sequence of launches lie in one buffer: two that are
// never needed at the same time may share bytes.
#pragma once
#include <cstdint>
#include <vector>

namespace exl3 {

constexpr int64_t kPlanAlign = 64;  // bytes

struct PlannedTensor {
  int64_t bytes;
  int64_t first, last;  // launches that need it, inclusive
  int64_t offset;       // found by plan_memory, a multiple of kPlanAlign
};

// Sets the offsets; returns the size of the buffer. Largest first, each as low as it can lie.
int64_t plan_memory(std::vector<PlannedTensor>& tensors);

}  // namespace exl3
