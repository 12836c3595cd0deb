// The output side of the even product. The thread block with a unit's last turn finishes it; others
// leave their sums of its groups in the L2, as words that are their own signals: one that was not
// written yet is zero, and no sum is all ones, whose complement that is. Who reads a word clears
// it.
#pragma once
#include "cuda/even/input.cuh"

namespace exl3::cuda {

static __device__ __forceinline__ void post(uint32_t* to, const float (&v)[4]) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(~__float_as_uint(v[0])), "r"(~__float_as_uint(v[1])),
               "r"(~__float_as_uint(v[2])), "r"(~__float_as_uint(v[3]))
               : "memory");
}

// Waits for the words, adds them to v and clears them.
static __device__ __forceinline__ void collect(uint32_t* from, float (&v)[4]) {
  uint4 w;
  do {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(from)
                 : "memory");
  } while (w.x == 0 || w.y == 0 || w.z == 0 || w.w == 0);
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(from), "r"(0)
               : "memory");
  v[0] += __uint_as_float(~w.x), v[1] += __uint_as_float(~w.y);
  v[2] += __uint_as_float(~w.z), v[3] += __uint_as_float(~w.w);
}

static __device__ __forceinline__ void store_aligned4(const Rows& row, int64_t column,
                                                      const float (&v)[4]) {
  if (row.type == DType::kFloat32) {
    *reinterpret_cast<float4*>(static_cast<float*>(row.data) + column) =
        float4{v[0], v[1], v[2], v[3]};
    return;
  }
  uint2 bits;
  if (row.type == DType::kFloat16) {
    const __half2 pair[2] = {__floats2half2_rn(v[0], v[1]), __floats2half2_rn(v[2], v[3])};
    bits = *reinterpret_cast<const uint2*>(pair);
  } else {
    const __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(v[0], v[1]),
                                    __floats2bfloat162_rn(v[2], v[3])};
    bits = *reinterpret_cast<const uint2*>(pair);
  }
  *reinterpret_cast<uint2*>(static_cast<half_bits*>(row.data) + column) = bits;
}

// What finishing needs to know of the rows: 1 / rms, and what the constant part of a weight adds to
// each sum of a row, if that is not in the sums yet.
template <bool kNorm>
struct EvenOneRow {
  const EvenRow& row;
  __device__ __forceinline__ float inverse_rms(int) const { return kNorm ? row.inverse_rms : 1.0f; }
  __device__ __forceinline__ float constant(int, int) const { return 0.0f; }
};

// A warp takes a unit of a row, a lane four outputs of each half: those of group lane / 16.
template <int kBits, class Facts>
class EvenFinish {
 public:
  // sums: [warp and group, see even_multiply][row][kGemvSumPitch].
  __device__ __forceinline__ EvenFinish(const EvenShare<kBits>& share, const float* sums,
                                        const Facts& facts)
      : share_(share), p_(share.p), sums_(sums), facts_(facts) {}

  // Brings the constants of the warp's first unit nearer.
  static __device__ __forceinline__ void prepare(const EvenShare<kBits>& share) {
    const EvenParams& p = share.p;
    const int unit = (share.group_of(share.last - 1) >> p.groups_log) - share.warp / p.rows;
    if (unit < share.group0 >> p.groups_log) return;
    const EvenGroup place(p, unit << p.groups_log);
    const int column = (place.inside >> 1) * kHadamardDim + share.lane * 4;
    for (int half = 0; half < p.groups_log; ++half) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p.w[place.weight + half].svh + column));
    }
  }

  __device__ __forceinline__ void run() const {
    const int log = p_.groups_log, lane = share_.lane;
    // From the last unit on: what others wait for goes out before this thread block waits.
    int unit = share_.group_of(share_.last - 1) >> log, row = share_.warp;
#pragma unroll 1
    for (;; row += kEvenWarps) {
      while (row >= p_.rows) row -= p_.rows, --unit;
      if (unit < share_.group0 >> log) break;
      const bool ends = ((unit + 1) << log) * p_.turns <= share_.last;
      const EvenGroup place(p_, unit << log);
      const int column = (place.inside >> 1) * kHadamardDim + lane * 4;
      const int y_column = p_.w[place.weight].column + column;
      uint4 old{};
      if (ends && p_.residual.data)
        old = aligned_raw4(p_.residual, row * p_.residual.stride + y_column);
      float result[4];
#pragma unroll 1
      for (int half = 0; half < log; ++half) {
        const EvenWeight& w = p_.w[place.weight + half];
        const uint2 scale = *reinterpret_cast<const uint2*>(w.svh + column);
        float v[4];
        gather((unit << log) + half * 2 + (lane >> 4), half, row, ends, v);
        if (!ends) continue;
        const float constant = facts_.constant(place.weight + half, row);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] += constant;
        __syncwarp();
        warp_hadamard_128(v);
        float f[4];
        convert4(uint4{scale.x, scale.y, 0, 0}, DType::kFloat16, f);
        const float norm = kHadamardNorm * facts_.inverse_rms(row);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] *= norm * f[i];
        if (w.bias) {
          const float4 bias = *reinterpret_cast<const float4*>(w.bias + column);
          v[0] += bias.x, v[1] += bias.y, v[2] += bias.z, v[3] += bias.w;
        }
        if (half == 0) {
#pragma unroll
          for (int i = 0; i < 4; ++i) result[i] = v[i];
        } else {
          gate(result, v);
        }
      }
      if (!ends) continue;
      if (p_.residual.data) {
        float s[4];
        convert4(old, p_.residual.type, s);
#pragma unroll
        for (int i = 0; i < 4; ++i) result[i] += s[i];
      }
      store_aligned4(p_.y, row * p_.y.stride + y_column, result);
    }
  }

 private:
  // The lane's four sums of a group: all if the thread block finishes it, else its own go out.
  __device__ __forceinline__ void gather(int group, int half, int row, bool ends,
                                         float (&v)[4]) const {
    const int start = group * p_.turns - share_.first, stop = start + p_.turns;
    const int size = p_.run * kEvenWarps, share = share_.last - share_.first;
    const int each = p_.rows * kEvenExchange;  // words of a thread block
    uint32_t* words =
        p_.exchange + blockIdx.x * each + row * kEvenExchange + half * 128 + share_.lane * 4;
    v[0] = v[1] = v[2] = v[3] = 0.0f;
    if (ends &&
        start < 0) {  // thread blocks before this one, up to that with the group's last turn
      const int nearest = stop <= 0 ? __umulhi(-stop, p_.per_block) : 0;
#pragma unroll 1
      for (int back = __umulhi(size - 1 - start, p_.per_block); back > nearest; --back) {
        collect(words - back * each, v);
      }
    }
    if (stop <= 0 || start >= share) return;
    const int pitch = p_.rows * kGemvSumPitch;
    const float* sums =
        sums_ + (group - share_.group0) * pitch + row * kGemvSumPitch + (share_.lane & 15) * 4;
    const int to = __umulhi(min(stop, share) - 1, p_.per_run);
#pragma unroll 2
    for (int warp = __umulhi(max(start, 0), p_.per_run); warp <= to; ++warp) {
      const float4 s = *reinterpret_cast<const float4*>(sums + warp * pitch);
      v[0] += s.x, v[1] += s.y, v[2] += s.z, v[3] += s.w;
    }
    if (!ends) post(words, v);
  }

  __device__ __forceinline__ void gate(float (&result)[4], const float (&v)[4]) const {
    if (p_.activation == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) result[i] = result[i] / (1.0f + __expf(-result[i])) * v[i];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) result[i] = activate(result[i], p_.activation) * v[i];
    }
  }

  const EvenShare<kBits>& share_;
  const EvenParams& p_;
  const float* sums_;
  Facts facts_;
};

}  // namespace exl3::cuda
