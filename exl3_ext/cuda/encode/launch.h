// Between the launcher and the kernels of each bit rate.
#pragma once
#include "exl3/encode.h"

namespace exl3::cuda {

struct SearchHeader {
  unsigned long long bad;   // first element that is not finite
  unsigned long long next;  // first tile that no block has taken
};
constexpr int kHeaderBytes = 256;

struct SearchShape {
  int tiles;   // side by side in a block
  int blocks;  // of the grid
};

template <int K>
Status launch_search(const EncodeParams& p, const SearchShape& shape, CudaStream stream);

// Workspace of one block.
template <int K>
int64_t search_block_bytes(int tiles);

}  // namespace exl3::cuda
