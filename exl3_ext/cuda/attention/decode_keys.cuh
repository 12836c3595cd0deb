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

// How many keys just before the new rows of a sequence, the first of which is at position `before`,
// other rows of the launch bring: the rows just before in qkv, as far as they are stored where the
// sequence has its keys. All lanes of a warp take part.
static __device__ __forceinline__ int count_brought(const DecodeAttentionParams& p, int sequence,
                                                    int before) {
  const int lane = threadIdx.x % kWarp;
  const int64_t rows = static_cast<int64_t>(sequence) * p.queries;  // before those of the sequence
  int count = 0, more = rows > 0 ? kWarp : 0;
#pragma unroll 1
  while (more == kWarp) {
    const int64_t line = rows - 1 - count - lane;
    const int position = before - 1 - count - lane;
    bool brought = false;
    if (line >= 0 && position >= 0) {
      const int64_t page = p.page_table[sequence * p.max_pages + position / kPageSize];
      const int64_t slot = page * kPageSize + position % kPageSize;
      brought = p.slots[line] == slot && page >= 0 && page < p.pages;
    }
    const unsigned others = __ballot_sync(0xFFFFFFFFu, !brought);
    more = others ? __ffs(others) - 1 : kWarp;
    count += more;
  }
  return count;
}

// The keys of a sequence in parts. How they are parted depends on the sequence alone. Old keys come
// from the cache: parts of 64 up to 256 keys, then of 128 (a part costs a thread block that has
// several about as much as 64 keys), from 2048 keys on kDecodeParts. The new rows are a part after
// those, but join the last one if there are 4, 8 or 16: so thread blocks share them evenly. Sums of
// parts are added as a binary tree over kDecodeParts leaves.
struct DecodeSpan {
  int length, before;  // keys with and without the new rows; `before` may be below 0
  int old;             // keys before the new rows
  int brought;         // the last of those, which other rows of the launch bring
  int begin, low;      // the first key that is copied, and that some row sees
  int size;            // keys in a part
  int fresh;           // the part of the new rows
  int parts, each;     // in all, and for a thread block

  __device__ __forceinline__ DecodeSpan(const DecodeAttentionParams& p, int sequence) {
    length = p.seq_lens[sequence];
    if (length < 0 || length > p.max_pages * kPageSize) length = 0;
    before = length - p.queries;
    old = before > 0 ? before : 0;
    brought = count_brought(p, sequence, before);
    low = p.window && old - p.window + 1 > 0 ? old - p.window + 1 : 0;
    begin = low / kStepKeys * kStepKeys;
    const int keys = old > begin ? old - begin : 0;
    const int rounds = (keys + kRoundKeys - 1) / kRoundKeys;
    size = (rounds + kDecodeParts - 1) / kDecodeParts * kRoundKeys;
    if (rounds > 4 && size < 2 * kRoundKeys) size = 2 * kRoundKeys;
    const int used = size ? (keys + size - 1) / size : 0;
    fresh = used >= 4 && (used & (used - 1)) == 0 ? used - 1 : used;
    parts = fresh + 1;
    each = 1;
    while (each * p.cluster < parts) each *= 2;
  }
  // Keys of `count` parts from `part` on: those at [from, return).
  __device__ __forceinline__ int range(int part, int count, int& from) const {
    from = begin + part * size;
    const int past = from + count * size;
    return past < old ? past : old;
  }
  // How many of those other rows of the launch bring, from `made` on; 0 or less: none.
  __device__ __forceinline__ int brought_keys(int part, int count, int& made) const {
    int from;
    const int end = range(part, count, from);
    made = old - brought > low ? old - brought : low;
    made = made > from ? made : from;
    return end - made;
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

  // `count` parts from `part` on: their keys are one stream.
  __device__ __forceinline__ void set(const DecodeSpan& span, int part, int count) {
    int from;
    end = span.range(part, count, from);
    low = span.low;
    first = from + threadIdx.x / kWarp * kStepKeys;
    steps = first < end ? (end - first + kRoundKeys - 1) / kRoundKeys : 0;
  }

  __device__ __forceinline__ void start() {
#pragma unroll 1
    for (int i = 0; i < kDecodeStages; ++i) load(i);
  }
};

}  // namespace exl3::cuda
