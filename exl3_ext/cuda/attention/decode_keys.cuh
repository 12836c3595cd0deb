// Which keys a thread block of a decode step reads, and how they come to shared memory.
#pragma once
#include "cuda/attention/decode_state.cuh"
#include "exl3/decode_attention.h"

namespace exl3::cuda {

constexpr int kDecodeWarps = 4;
constexpr int kDecodeThreads = kDecodeWarps * kWarp;
constexpr int kDecodeStages = 2;
constexpr int kDecodeParts = 16;  // most parts that the keys of a sequence are summed in
constexpr int kRoundKeys = kDecodeWarps * kStepKeys;

// The keys of a sequence in parts. How they are parted depends on the sequence alone. Old keys come
// from the cache; the new rows are the part after the last one that has old keys, if there is one
// left, else they join the last. Sums of parts are added as a binary tree over kDecodeParts leaves.
struct DecodeSpan {
  int length, before;  // keys with and without the new rows; `before` may be below 0
  int old;             // keys in the cache
  int begin, low;      // the first key that is copied, and that some row sees
  int size;            // keys in a part
  int fresh;           // the part of the new rows
  int parts;

  __device__ __forceinline__ DecodeSpan(const DecodeAttentionParams& p, int sequence) {
    length = p.seq_lens[sequence];
    if (length < 0 || length > p.max_pages * kPageSize) length = 0;
    before = length - p.queries;
    old = before > 0 ? before : 0;
    low = p.window && old - p.window + 1 > 0 ? old - p.window + 1 : 0;
    begin = low / kStepKeys * kStepKeys;
    const int keys = old > begin ? old - begin : 0;
    const int rounds = (keys + kRoundKeys - 1) / kRoundKeys;
    size = (rounds + kDecodeParts - 1) / kDecodeParts * kRoundKeys;
    const int used = size ? (keys + size - 1) / size : 0;
    fresh = used < kDecodeParts ? used : kDecodeParts - 1;
    parts = fresh + 1;
  }
};

// Copies of one warp: every fourth step of 16 keys, kDecodeStages ahead.
template <int D>
struct DecodeKeys {
  static constexpr int kHalves = kStepKeys * D;  // of K or V of a step
  static constexpr int kUnits = D / 8, kCopies = kStepKeys * kUnits / kWarp;
  static constexpr int kRowsOfCopy = kWarp / kUnits;  // rows that a warp copies at once
  static_assert(kWarp % kUnits == 0, "a lane keeps its column");
  const DecodeAttentionParams& p;
  const int32_t* pages;  // of the sequence
  __half* room;          // of the warp: [stage][K, V][16][D]
  int kv_head, low;
  int first, end, steps;
  int page_base, page;  // lane l knows page page_base + l
  unsigned missing;     // bit i: the step in stage i has no page

  __device__ __forceinline__ DecodeKeys(const DecodeAttentionParams& params, int sequence, int head,
                                        __half* to)
      : p(params), pages(p.page_table + sequence * p.max_pages), room(to), kv_head(head) {
    page_base = -kWarp;
    missing = 0;
  }

  __device__ __forceinline__ int key(int step) const { return first + step * kRoundKeys; }
  __device__ __forceinline__ __half* place(int step) const {
    return room + step % kDecodeStages * 2 * kHalves;
  }
  __device__ __forceinline__ bool known(int step) const {
    return !(missing >> step % kDecodeStages & 1);
  }

  // The page of a key; below 0 if it lies outside the cache.
  __device__ __forceinline__ int page_of(int key) {
    const int lane = threadIdx.x % kWarp, index = key / kPageSize;
    if (index - page_base >= kWarp) {
      page_base = index;
      page = -1;
      if (index + lane <= (end - 1) / kPageSize) page = pages[index + lane];
    }
    const int found = __shfl_sync(0xFFFFFFFFu, page, index - page_base);
    return found < p.pages ? found : -1;
  }

  // Keys [from, past) of 16 from `slot` of the cache on; zeros for the others.
  template <bool kIsK>
  __device__ __forceinline__ void copy(const half_bits* cache, int64_t slot, int dim, int from,
                                       int past, __half* to) const {
    const int lane = threadIdx.x % kWarp, key = lane / kUnits, unit = lane % kUnits;
    const bool exists = unit * 8 < dim;
    const int row = p.kv_heads * dim, stride = exists ? kRowsOfCopy * row : 0;
    const half_bits* source = cache + slot * row + (key * row + kv_head * dim + unit * 8);
    if (!exists) source = cache;
    // Unit k_unit or v_unit of row key + i * kRowsOfCopy: the bits of i are apart from the others.
    const int own = key * D + (kIsK ? k_unit(key, unit) : v_unit(key, unit)) * 8;
    if (from <= 0 && past >= kStepKeys) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        copy_async<16>(to + (own ^ swap<kIsK>(i)) + i * kRowsOfCopy * D, source, exists);
        source += stride;
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const int at = key + i * kRowsOfCopy;
      const bool valid = exists && at >= from && at < past;
      copy_async<16>(to + (own ^ swap<kIsK>(i)) + i * kRowsOfCopy * D, valid ? source : cache,
                     valid);
      source += stride;
    }
  }
  template <bool kIsK>
  static __device__ __forceinline__ int swap(int i) {
    return (kIsK ? i * kRowsOfCopy % 2 * 4 : i * kRowsOfCopy % 8) * 8;
  }

  // One group of copies, empty past the last step.
  __device__ __forceinline__ void load(int step) {
    if (step < steps) {
      const int key0 = key(step), found = page_of(key0);
      const unsigned bit = 1u << step % kDecodeStages;
      missing = found < 0 ? missing | bit : missing & ~bit;
      if (found >= 0) {
        const int64_t slot = static_cast<int64_t>(found) * kPageSize + key0 % kPageSize;
        copy<true>(p.k_cache, slot, p.head_dim, low - key0, end - key0, place(step));
        copy<false>(p.v_cache, slot, p.v_head_dim, low - key0, end - key0, place(step) + kHalves);
      }
    }
    copy_commit();
  }

  // Begins `count` parts from `part` on: their keys are one stream.
  __device__ __forceinline__ void start(const DecodeSpan& span, int part, int count) {
    const int from = span.begin + part * span.size, past = from + count * span.size;
    low = span.low;
    end = past < span.old ? past : span.old;
    first = from + threadIdx.x / kWarp * kStepKeys;
    steps = first < end ? (end - first + kRoundKeys - 1) / kRoundKeys : 0;
#pragma unroll 1
    for (int i = 0; i < kDecodeStages; ++i) load(i);
  }
};

}  // namespace exl3::cuda
