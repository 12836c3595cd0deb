// Small types that host and device code share. Torch-free.
#pragma once
#include <cstdint>

namespace exl3 {

// float16 and bfloat16 travel as their bits; only kernels give them meaning.
using half_bits = uint16_t;
using bf16_bits = uint16_t;

// The runtime's stream type, named here so that headers need no CUDA toolkit.
}  // namespace exl3
struct CUstream_st;
namespace exl3 {
using CudaStream = CUstream_st*;

enum class Codebook : int { k3inst = 0, kMcg = 1, kMul1 = 2 };
constexpr int kCodebooks = 3;

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr int kHadamardDim = 128;
constexpr int kTileDim = 16;
constexpr int kTileNumel = 256;
constexpr int kPageSize = 256;

}  // namespace exl3
