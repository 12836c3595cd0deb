// Tiles of a quantised K and V: words are copied to shared memory one tile ahead, then decoded to
// float16 tiles beside them; their scales wait in registers.
#pragma once
#include "cuda/attention/problem.cuh"
#include "cuda/attention/tiles.cuh"
#include "cuda/cache/kv_quant.cuh"

namespace exl3::cuda {

// Words of a tile of K or V.
static __host__ __device__ __forceinline__ int tile_words(const QuantRows& rows, int dim,
                                                          int keys) {
  return keys * quant_blocks(dim) * rows.bits;
}

// Bytes of shared memory for the words of a tile of K and one of V.
static inline int quant_tile_bytes(const Attention<void>& a, int keys) {
  return 4 * (tile_words(a.k_quant, a.head_dim, keys) + tile_words(a.v_quant, a.v_head_dim, keys));
}

// Keys of one tile that are read: all in one page, from `row` on, `step` rows apart.
struct TileKeys {
  int64_t row;
  int step, first, end;  // keys [first, end) of the tile

  __device__ __forceinline__ bool has(int key) const { return key >= first && key < end; }
};

// K or V of up to D dims, kKeys keys a tile. kThreads: of the block.
template <int D, int kThreads, int kKeys>
struct QuantTile {
  static constexpr int kBlocks = D / kQuantBlock;
  static constexpr int kRecords = (kKeys * kBlocks + kThreads - 1) / kThreads;
  QuantRows from;
  int blocks;
  __half scales[kRecords];  // of the tile copied last

  __device__ __forceinline__ void start(const QuantRows& rows, int dim) {
    from = rows;
    blocks = quant_blocks(dim);
  }

  template <int kWords>
  __device__ __forceinline__ void copy_by(uint32_t* to, const TileKeys& keys) const {
    const int width = blocks * from.bits, each = width / kWords;
    for (int i = threadIdx.x; i < kKeys * each; i += kThreads) {
      const int key = i / each;
      const bool valid = keys.has(key);
      const int64_t row = valid ? keys.row + static_cast<int64_t>(key) * keys.step : keys.row;
      copy_async<4 * kWords>(to + i * kWords, from.words + row * width + (i - key * each) * kWords,
                             valid);
    }
  }

  // Starts the copy of a tile; what is left out decodes to zero.
  __device__ __forceinline__ void copy(uint32_t* to, const TileKeys& keys) {
    const int width = blocks * from.bits;
    const bool aligned = reinterpret_cast<uintptr_t>(from.words) % 16 == 0;
    if (aligned && width % 4 == 0)
      copy_by<4>(to, keys);
    else if (aligned && width % 2 == 0)
      copy_by<2>(to, keys);
    else
      copy_by<1>(to, keys);
#pragma unroll
    for (int r = 0; r < kRecords; ++r) {
      const int i = threadIdx.x + r * kThreads, key = i / kBlocks, block = i % kBlocks;
      const bool valid = block < blocks && keys.has(key);
      const int64_t row = keys.row + static_cast<int64_t>(key) * keys.step;
      scales[r] = valid ? __ushort_as_half(from.scales[row * blocks + block]) : __half(0.0f);
    }
  }

  template <int kBits, int kStride>
  __device__ __forceinline__ void decode_bits(const uint32_t* words, __half* to,
                                              const __half (&own)[kRecords]) const {
#pragma unroll 1
    for (int r = 0; r < kRecords; ++r) {
      const int i = threadIdx.x + r * kThreads, key = i / kBlocks, block = i % kBlocks;
      if (kKeys * kBlocks % kThreads != 0 && key >= kKeys) break;
      __half scale = own[0];
#pragma unroll
      for (int j = 1; j < kRecords; ++j) scale = r == j ? own[j] : scale;
      uint4* out = reinterpret_cast<uint4*>(to + key * kStride + block * kQuantBlock);
      if (block < blocks) {
        const int swap = block & 2;  // see `decoded_place`
        decode_block<kBits>(words + (key * blocks + block) * kBits, scale, out + swap,
                            out + (2 - swap));
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Decodes a tile of rows kStride apart from its words and the scales that `copy` left.
  template <int kStride>
  __device__ __forceinline__ void decode(const uint32_t* words, __half* to,
                                         const __half (&own)[kRecords]) const {
    switch (from.bits) {
      case 2:
        return decode_bits<2, kStride>(words, to, own);
      case 3:
        return decode_bits<3, kStride>(words, to, own);
      case 4:
        return decode_bits<4, kStride>(words, to, own);
      case 5:
        return decode_bits<5, kStride>(words, to, own);
      case 6:
        return decode_bits<6, kStride>(words, to, own);
      case 7:
        return decode_bits<7, kStride>(words, to, own);
      default:
        return decode_bits<8, kStride>(words, to, own);
    }
  }
};

}  // namespace exl3::cuda
