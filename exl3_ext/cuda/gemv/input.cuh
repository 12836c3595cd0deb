// The input side of the small-batch product: Hblk(x * norm * suh), rounded by one scale a row.
//
// mul1: an activation is the integer 256*high + low, bytes that stand in two columns of a B
// fragment (four rows a fragment). Other codebooks: float16, one column a row (eight rows). Words
// of a step of 16 inputs, lane t, q = t mod 4:
//   mul1   1: column t/4 (row t/8, low or high), inputs 2q, 2q+1, 2q+8, 2q+9
//   other  2: row t/4, inputs 2q, 2q+1 | 2q+8, 2q+9
#pragma once
#include "cuda/common/reduce.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/gemv/shape.h"
#include "exl3/codebook.h"

namespace exl3::cuda {

template <int kFragments>
struct IntegerInput {
  static constexpr bool kInteger = true;
  static constexpr float kMost = 32639.0f;  // 127 * 256 + 127
  static constexpr int kStepWords = kFragments * kWarp;

  // Rounds and stores 4 inputs of a row: 4*(lane%4).. of step lane/4 of the 128-block whose words
  // start at `block`. Returns the sum of the integers.
  static __device__ __forceinline__ int store(uint32_t* block, int row, const float (&v)[4],
                                              float inverse) {
    const int lane = threadIdx.x & (kWarp - 1), part = lane & 3;
    uint32_t* words = block + (lane / 4) * kStepWords + (row / 4) * kWarp + (row & 3) * 8;
    auto* halves = reinterpret_cast<uint16_t*>(words) + (part & 1) * 4 + (part >> 1);
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int a = __float2int_rn(v[i] * inverse), b = __float2int_rn(v[i + 1] * inverse);
      sum += a + b;
      halves[i] = static_cast<uint16_t>((a & 255) | ((b & 255) << 8));
      // a = 256*high + low with low as a signed byte.
      halves[i + 8] = static_cast<uint16_t>((((a + 128) >> 8) & 255) | ((b + 128) & 0xFF00));
    }
    return sum;
  }

  // What the constant part of the weights adds to every sum of a row.
  static __device__ __forceinline__ float offset(float scale, int sum) {
    const float a = __half2float(__ushort_as_half(kMul1ScaleBits));
    const float c = __half2float(__ushort_as_half(kMul1OffsetBits));
    return scale * (kMul1Bias * a + c) * static_cast<float>(sum);
  }
};

template <int kFragments>
struct HalfInput {
  static constexpr bool kInteger = false;
  static constexpr float kMost = 16.0f;
  static constexpr int kStepWords = kFragments * kWarp * 2;

  static __device__ __forceinline__ int store(uint32_t* block, int row, const float (&v)[4],
                                              float inverse) {
    const int lane = threadIdx.x & (kWarp - 1), part = lane & 3;
    uint32_t* words = block + (lane / 4) * kStepWords + (row / 8) * kWarp * 2 + (row & 7) * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const __half2 pair = __floats2half2_rn(v[2 * i] * inverse, v[2 * i + 1] * inverse);
      words[((part & 1) * 2 + i) * 2 + (part >> 1)] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return 0;
  }

  static __device__ __forceinline__ float offset(float, int) { return 0.0f; }
};

// Per half (gate, up) and row: the largest magnitude as bits, the scale, the sum of the integers.
struct GemvScales {
  uint32_t most[2][kGemvMaxRows];
  float scale[2][kGemvMaxRows];
  int sum[2][kGemvMaxRows];
  float inverse_rms[kGemvMaxRows];  // set only by a launch before
};

// Where a launch before puts its results: activations of each weight, then the numbers of its rows.
struct GemvWorkspace {
  uint32_t* activations;  // [weight][k/16][kStepWords]
  float* scale;           // [weight][16]
  int* sum;               // [weight][16]
  float* inverse_rms;     // [16]

  __host__ __device__ GemvWorkspace(unsigned char* base, int64_t activation_bytes, int count) {
    activations = reinterpret_cast<uint32_t*>(base);
    scale = reinterpret_cast<float*>(base + activation_bytes);
    sum = reinterpret_cast<int*>(scale + count * kGemvMaxRows);
    inverse_rms = reinterpret_cast<float*>(sum + count * kGemvMaxRows);
  }
};

// suh * norm at the lane's four inputs of a block.
static __device__ __forceinline__ void input_factors(const GemvParams& p, const half_bits* suh,
                                                     int block, float (&factor)[4]) {
  const int column = block * kHadamardDim + (threadIdx.x & (kWarp - 1)) * 4;
  const int count = count4(column, p.in_features);
  const uint4 scale = load_raw4(suh, DType::kFloat16, column, 4);
  uint4 norm{};
  if (p.norm_weight) norm = load_raw4(p.norm_weight, DType::kFloat32, column, count);
  convert4(scale, DType::kFloat16, factor);
  if (p.norm_weight) {
    float n[4];
    convert4(norm, DType::kFloat32, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) factor[i] *= n[i] + p.norm_offset;
  }
}

static __device__ __forceinline__ uint4 input_raw(const GemvParams& p, int row, int block) {
  const int column = block * kHadamardDim + (threadIdx.x & (kWarp - 1)) * 4;
  return load_raw4(p.x.data, p.x.type, row * p.x.stride + column, count4(column, p.in_features));
}

// Hblk(x * factor) without its norm; *square gets the lane's sum of x^2, *most the warp's largest
// magnitude as bits (a NaN is the most).
static __device__ __forceinline__ void input_transform(const GemvParams& p, const uint4& raw,
                                                       const float (&factor)[4], float (&v)[4],
                                                       float* square, uint32_t* most) {
  convert4(raw, p.x.type, v);
  *square = v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] *= factor[i];
  warp_hadamard_128(v);
  uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) m = max(m, __float_as_uint(fabsf(v[i])));
  *most = warp_max(m);
}

// The factor that brings a row to its integers or halves. Rows below 1e-30 count as zeros; infinity
// and NaN stay in the scale.
static __device__ __forceinline__ float inverse_of(float most, float target) {
  return most > 1e-30f && most < 1e38f ? target / most : 0.0f;
}

// kHadamardNorm of the transform goes into the scale.
static __device__ __forceinline__ float scale_of(float most, float target) {
  return most / target * kHadamardNorm;
}

}  // namespace exl3::cuda
