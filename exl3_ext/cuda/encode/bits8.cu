#include "cuda/encode/search_launch.cuh"

namespace exl3::cuda {

template Status launch_search<8>(const EncodeParams&, const SearchShape&, CudaStream);
template int search_shared_bytes<8>(int);
template int64_t search_block_bytes<8>(const SearchShape&);

}  // namespace exl3::cuda
