#include "cpu/memory_plan.h"

#include <algorithm>
#include <numeric>

namespace exl3 {
namespace {

int64_t aligned(int64_t bytes) { return (bytes + kPlanAlign - 1) / kPlanAlign * kPlanAlign; }

// The lowest place for `tensor` beside the `placed` ones, which are in order of their offsets.
int64_t lowest_place(const PlannedTensor& tensor, const std::vector<const PlannedTensor*>& placed) {
  int64_t at = 0;
  for (const PlannedTensor* other : placed) {
    if (other->last < tensor.first || tensor.last < other->first) continue;
    if (at + aligned(tensor.bytes) <= other->offset) break;
    at = std::max(at, other->offset + aligned(other->bytes));
  }
  return at;
}

}  // namespace

int64_t plan_memory(std::vector<PlannedTensor>& tensors) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return tensors[a].bytes > tensors[b].bytes; });
  std::vector<const PlannedTensor*> placed;
  int64_t size = 0;
  for (const size_t i : order) {
    PlannedTensor& tensor = tensors[i];
    tensor.offset = lowest_place(tensor, placed);
    size = std::max(size, tensor.offset + aligned(tensor.bytes));
    const auto after = std::upper_bound(
        placed.begin(), placed.end(), tensor.offset,
        [](int64_t offset, const PlannedTensor* other) { return offset < other->offset; });
    placed.insert(after, &tensor);
  }
  return size;
}

}  // namespace exl3
