#include "bind/cuda/zeroed.h"

#include <torch/csrc/stable/ops.h>

#include <map>
#include <mutex>
#include <tuple>

namespace exl3::bind {

uint32_t* zeroed_words(const Tensor& near, const CudaLaunch& launch, int64_t words) {
  static std::mutex mutex;
  static auto& all = *new std::map<std::tuple<int, cudaStream_t, int64_t>, Tensor>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto key =
      std::make_tuple(static_cast<int>(near.get_device_index()), launch.stream(), words);
  auto found = all.find(key);
  if (found == all.end()) {
    found = all.emplace(key, torch::stable::new_zeros(near, {words}, ScalarType::Int)).first;
  }
  return data_mut<uint32_t>(found->second);
}

}  // namespace exl3::bind
