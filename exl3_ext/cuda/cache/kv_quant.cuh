// Quantised K and V rows, see exl3/kv_quant.h: a warp quantises a head, a thread decodes a block.
#pragma once
#include "cuda/common/vector.cuh"
#include "exl3/kv_quant.h"

namespace exl3::cuda {

// One value a lane: rotates a block of `size` values; lanes past it hold 0.
static __device__ __forceinline__ float rotate_lanes(float v, int size) {
  const int lane = threadIdx.x % kWarp, turn = quant_rotation(size);
#pragma unroll
  for (int h = 1; h < kQuantBlock; h *= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, v, h);
    if (h < turn) v = lane & h ? other - v : v + other;
  }
  return v * quant_rotation_norm(turn);
}

// Four neighbouring values a lane, eight lanes a block.
static __device__ __forceinline__ void rotate_fours(float (&v)[4], int size) {
  const int lane = threadIdx.x % kWarp, turn = quant_rotation(size);
  if (turn > 1) {
    const float a = v[0], b = v[2];
    v[0] = a + v[1], v[1] = a - v[1];
    v[2] = b + v[3], v[3] = b - v[3];
  }
  if (turn > 2) {
    const float a = v[0], b = v[1];
    v[0] = a + v[2], v[2] = a - v[2];
    v[1] = b + v[3], v[3] = b - v[3];
  }
#pragma unroll
  for (int h = 1; h < 8; h *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], h);
      if (4 * h < turn) v[i] = lane & h ? other - v[i] : v[i] + other;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] *= quant_rotation_norm(turn);
}

static __device__ __forceinline__ float sum_of_eight(float v) {
#pragma unroll
  for (int h = 1; h < 8; h *= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, h);
  return v;
}

static __device__ __forceinline__ float quant_level(float v, float step, float half) {
  const float per_step = step > 0.0f ? 1.0f / step : 0.0f;
  return fminf(fmaxf(rintf(fmaf(v, per_step, half - 0.5f)), 0.0f), 2.0f * half - 1.0f);
}

// The scale of each block; `valid` values of this lane's four belong to it. NaN if one of the
// block's values is not finite.
static __device__ __forceinline__ __half quant_scale(const float (&v)[4], int valid, int bits) {
  const float half = static_cast<float>(1 << (bits - 1));
  float most = 0.0f, zero = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    most = fmaxf(most, fabsf(v[i]));
    zero += v[i] * 0.0f;
  }
#pragma unroll
  for (int h = 1; h < 8; h *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, h));
  zero = sum_of_eight(zero);
  __half best = __float2half_rn(0.0f);
  float least = 0.0f;
#pragma unroll
  for (int c = 0; c < kQuantCandidates; ++c) {
    const __half scale = __float2half_rn(most * quant_candidate(bits, c) + zero);
    const float step = __half2float(scale) / half;
    float error = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float miss = v[i] - (quant_level(v[i], step, half) - (half - 0.5f)) * step;
      if (i < valid) error = fmaf(miss, miss, error);
    }
    error = sum_of_eight(error);
    if (c && !(error < least)) continue;
    best = scale;
    least = error;
  }
  return best;
}

// The words of a block from the codes of eight lanes; those of `present` blocks are stored.
static __device__ __forceinline__ void pack_fours(const unsigned (&codes)[4], int bits,
                                                  bool present, uint32_t* words) {
  const int j = threadIdx.x % 8;
  unsigned pair[4];  // in lanes 0..3 of the eight: codes p = 4j.. and 16 + p
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pair[i] = codes[i] | __shfl_xor_sync(0xFFFFFFFFu, codes[i], 4) << 16;
  }
  present &= j < 4;
  int low = 0;
#pragma unroll
  for (int width = 8; width; width /= 2) {
    if (!(bits & width)) continue;
    const unsigned mask = ((1u << width) - 1) * 0x10001u;
    if (width == 8) {
      if (present) {
        words[2 * j] = (pair[0] >> low & mask) | (pair[1] >> low & mask) << 8;
        words[2 * j + 1] = (pair[2] >> low & mask) | (pair[3] >> low & mask) << 8;
      }
    } else {
      const int lanes = 4 / width;  // that share a word
      unsigned word = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) word |= (pair[i] >> low & mask) << (width * i);
      word <<= 4 * width * (j % lanes);
      for (int h = 1; h < lanes; h *= 2) word |= __shfl_xor_sync(0xFFFFFFFFu, word, h);
      if (present && j % lanes == 0) words[j / lanes] = word;
    }
    words += width;
    low += width;
  }
}

// A warp stores head row `row` of dim values.
template <class T>
static __device__ __forceinline__ void quantise_head(const T* x, int dim, const QuantRowsOut& to,
                                                     int64_t row) {
  const int lane = threadIdx.x % kWarp, blocks = quant_blocks(dim), bits = to.bits;
  const float half = static_cast<float>(1 << (bits - 1));
  for (int first = 0; first < dim; first += 4 * kWarp) {
    const int at = first + 4 * lane, block = at / kQuantBlock;
    const bool present = block < blocks;
    const int valid = dim - at < 0 ? 0 : dim - at < 4 ? dim - at : 4;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = i < valid ? to_float<T>(x[at + i]) : 0.0f;
    rotate_fours(v, present ? quant_block_size(dim, block) : kQuantBlock);
    const __half scale = quant_scale(v, valid, bits);
    const float step = __half2float(scale) / half;
    const bool usable = step > 0.0f && step < INFINITY;
    unsigned codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool coded = usable && i < valid;
      codes[i] = coded ? static_cast<unsigned>(quant_level(v[i], step, half)) : 0u;
    }
    const int64_t place = row * blocks + block;
    pack_fours(codes, bits, present, to.words + place * bits);
    if (present && lane % 8 == 0) to.scales[place] = __half_as_ushort(scale);
  }
}

// Where value t of block `block` lies after decoding: codes t and t + 16 come out side by side.
// Every other pair of blocks has its halves swapped, so that threads with neighbouring blocks write
// to different banks.
static __device__ __forceinline__ int decoded_place(int t, int block) {
  return (t % 16 * 2 + t / 16) ^ (block & 2) << 3;
}

// One plane of a block: adds its bits, from bit kLow of the codes on, to pairs of codes shifted
// left by one.
template <int kWidth, int kLow>
static __device__ __forceinline__ void add_plane(unsigned (&pairs)[16], const unsigned* words) {
  constexpr int kEach = 16 / kWidth, kTo = kLow + 1;
  constexpr unsigned kMask = (((1u << kWidth) - 1) * 0x10001u) << kTo;
#pragma unroll
  for (int p = 0; p < 16; ++p) {
    const unsigned w = words[p / kEach];
    const int by = kWidth * (p % kEach) - kTo;
    pairs[p] |= (by > 0 ? w >> by : w << -by) & kMask;
  }
}

// Words of a block, in loads as wide as its size allows; blocks follow each other from a multiple
// of 16 bytes on.
template <int kBits>
static __device__ __forceinline__ void load_block(unsigned (&w)[kBits], const uint32_t* words) {
#pragma unroll
  for (int i = 0; i < kBits;) {
    if constexpr (kBits % 4 == 0) {
      const uint4 u = *reinterpret_cast<const uint4*>(words + i);
      w[i] = u.x, w[i + 1] = u.y, w[i + 2] = u.z, w[i + 3] = u.w;
      i += 4;
    } else if constexpr (kBits % 2 == 0) {
      const uint2 u = *reinterpret_cast<const uint2*>(words + i);
      w[i] = u.x, w[i + 1] = u.y;
      i += 2;
    } else {
      w[i] = words[i];
      i += 1;
    }
  }
}

// The 32 values of a block as float16, 16 to `low` and 16 to `high`. The half of exponent 10 -
// kBits and mantissa 2 code + 1 is 2^(10-kBits) + (2 code + 1) / 2^kBits; without 2^(10-kBits) + 1
// that is the value over the scale, exactly.
template <int kBits>
static __device__ __forceinline__ void decode_block(const uint32_t* words, __half scale, uint4* low,
                                                    uint4* high) {
  constexpr unsigned kBase = (static_cast<unsigned>(25 - kBits) << 10 | 1u) * 0x10001u;
  unsigned w[kBits], pairs[16];
  load_block<kBits>(w, words);
#pragma unroll
  for (int p = 0; p < 16; ++p) pairs[p] = kBase;
  if constexpr ((kBits & 8) != 0) add_plane<8, 0>(pairs, w);
  if constexpr ((kBits & 4) != 0) add_plane<4, 0>(pairs, w);
  if constexpr ((kBits & 2) != 0) add_plane<2, (kBits & 4)>(pairs, w + (kBits & 4));
  if constexpr ((kBits & 1) != 0) add_plane<1, (kBits & 6)>(pairs, w + (kBits & 6));
  const __half2 offset = __float2half2_rn(static_cast<float>(1 << (10 - kBits)) + 1.0f);
  const __half2 scales = __half2half2(scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint4 out;
    __half2* h = reinterpret_cast<__half2*>(&out);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const __half2 x = *reinterpret_cast<const __half2*>(&pairs[4 * i + j]);
      h[j] = __hmul2(__hsub2(x, offset), scales);
    }
    (i < 2 ? low : high)[i % 2] = out;
  }
}

}  // namespace exl3::cuda
