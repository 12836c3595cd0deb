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
  int tiles;       // side by side in a block
  int blocks;      // of the grid
  bool in_global;  // what should be in shared memory is in the workspace
};

template <int K>
Status launch_search(const EncodeParams& p, const SearchShape& shape, CudaStream stream);

// Shared memory of one block of 1, 2 or 4 tiles.
template <int K>
int search_shared_bytes(int tiles);

// Workspace of one block.
template <int K>
int64_t search_block_bytes(const SearchShape& shape);

}  // namespace exl3::cuda
