// Linear layer: the prologue, the inner product and the epilogue in plain C++. The integer parts
// are what faster levels must match bit for bit.
#include "cpu/generic/linear.h"

#include <cmath>

#include "cpu/generic/half.h"
#include "cpu/generic/rows.h"
#include "exl3/codebook.h"

namespace exl3::generic {
namespace {

void hadamard(float* v) {
  for (int h = 1; h < kHadamardDim; h *= 2) {
    for (int i = 0; i < kHadamardDim; i += 2 * h) {
      for (int j = i; j < i + h; ++j) {
        const float a = v[j], b = v[j + h];
        v[j] = a + b;
        v[j + h] = a - b;
      }
    }
  }
}

// 1 / rms of a row, or 1 without a norm.
float norm_scale(const LinearParams& p, const float* x) {
  if (!p.norm_weight) return 1.0f;
  double sum = 0;
  for (int64_t i = 0; i < p.in_features; ++i) sum += static_cast<double>(x[i]) * x[i];
  return static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(p.in_features) + p.norm_eps));
}

// (x normed) * suh of one block, transformed; inputs past in_features are zero.
void input_block(const LinearParams& p, const LinearWeightRef& ref, int64_t row, float inverse_rms,
                 int64_t block, float* v) {
  const float* x = p.x + row * p.x_stride;
  for (int i = 0; i < kHadamardDim; ++i) {
    const int64_t at = block * kHadamardDim + i;
    if (at >= p.in_features) {
      v[i] = 0.0f;
      continue;
    }
    v[i] = x[at];
    if (p.norm_weight) v[i] = v[i] * inverse_rms * (p.norm_weight[at] + p.norm_offset);
    v[i] *= half_to_float(ref.suh[at]);
  }
  hadamard(v);
}

// A block is quantised to steps of peak / q_max. Blocks under kTiny count as zero: their
// reciprocal could overflow.
constexpr float kTiny = 1e-30f;

void quantise(const float* v, const LinearWeightRef& ref, const LinearWeightPlan& w, int16_t* q,
              LinearBlockMeta* meta) {
  uint32_t top = 0;  // largest magnitude as bits: NaN above infinity above numbers
  for (int i = 0; i < kHadamardDim; ++i) {
    const uint32_t bits = bits_of(v[i]) & 0x7FFFFFFF;
    if (bits > top) top = bits;
  }
  const float peak = float_of(top);
  const float q_max = static_cast<float>(w.choice.q_max);
  const float inverse = peak < kTiny ? 0.0f : q_max / peak;
  const bool finite = top < 0x7F800000;
  const bool twice = w.choice.kernel == LinearKernel::kBytes;
  int32_t sum = 0;
  for (int i = 0; i < kHadamardDim; ++i) {
    const int position = i & 15, place = i & ~15;
    // position = 2j + {0, 1, 8, 9}[e]
    const int e = (position & 1) + 2 * (position >> 3), j = (position >> 1) & 3;
    const int value = finite ? static_cast<int>(std::lrintf(v[i] * inverse)) : 0;
    sum += value;
    q[place + 4 * e + j] = static_cast<int16_t>(twice ? (value & 255) * 257 : value);
  }
  const LinearScale scale = linear_scale(ref.codebook);
  const float unit = (peak < kTiny ? 0.0f : peak / q_max) * kHadamardNorm;
  meta->scale = unit * scale.step;
  meta->offset = unit * scale.zero * static_cast<float>(sum);
  meta->init = -scale.centre * sum;
}

// Stream byte j of lane t (trellis.h).
uint32_t lane_byte(const uint16_t* tile, int bits, int t, int j) {
  if (j == bits - 1 && bits % 2 == 1) {
    return reinterpret_cast<const uint8_t*>(tile + 32 * (bits / 2))[t];
  }
  const uint32_t word = tile[32 * (j / 2) + t];
  return j % 2 == 0 ? word >> 8 : word & 255;
}

// A float16 of exponent field 12..15, as an integer multiple of 2^-13.
int fixed_point(uint32_t half) {
  const int magnitude = static_cast<int>((half & 0x3FF) | 0x400) << (((half >> 10) & 31) - 12);
  return half & 0x8000 ? -magnitude : magnitude;
}

// Every state's v, made at the first use.
const int16_t* value_table(Codebook codebook) {
  struct Table {
    int16_t v[65536];
    explicit Table(Codebook c) {
      for (uint32_t state = 0; state < 65536; ++state) {
        if (c == Codebook::kMul1) {
          v[state] = static_cast<int16_t>(mul1_byte_sum(state));
          continue;
        }
        const uint32_t pair = half_pair(c, state);
        v[state] = static_cast<int16_t>(fixed_point(pair & 0xFFFF) + fixed_point(pair >> 16));
      }
    }
  };
  static const Table tables[kCodebooks] = {Table(Codebook::k3inst), Table(Codebook::kMcg),
                                           Table(Codebook::kMul1)};
  return tables[static_cast<int>(codebook)].v;
}

// v of one tile, [16 columns][16 inputs in the order of q].
void tile_values(const uint16_t* tile, int bits, const int16_t* table, int16_t (*v)[16]) {
  // 16 bits before lane 0: the last bytes of lane 31, of 30 and 31 at one bit.
  uint32_t state = lane_byte(tile, bits, 31, bits - 1);
  state |= (bits == 1 ? lane_byte(tile, 1, 30, 0) : lane_byte(tile, bits, 31, bits - 2)) << 8;
  for (int t = 0; t < 32; ++t) {
    uint64_t stream = 0;  // the 8 * bits bits of the lane
    for (int j = 0; j < bits; ++j) stream = stream << 8 | lane_byte(tile, bits, t, j);
    for (int e = 0; e < 8; ++e) {
      const uint32_t next = static_cast<uint32_t>(stream >> (bits * (7 - e))) & ((1u << bits) - 1);
      state = (state << bits | next) & 0xFFFF;
      v[t / 4 + 8 * (e / 4)][4 * (e % 4) + t % 4] = table[state];
    }
  }
}

// Sum of one 128-block for one row and column, modulo 2^32 as in registers.
int32_t block_sum(const int16_t (*v)[16][16], int column, const int16_t* q, int32_t init) {
  uint32_t sum = static_cast<uint32_t>(init);
  for (int tile = 0; tile < 8; ++tile) {
    for (int i = 0; i < 16; ++i) {
      sum += static_cast<uint32_t>(v[tile][column][i] * q[16 * tile + i]);
    }
  }
  return static_cast<int32_t>(sum);
}

}  // namespace

void linear_prologue(const LinearParams& p, const LinearWeightPlan& w, int weight, int64_t row,
                     int64_t begin, int64_t end) {
  const LinearWeightRef& ref = p.w[weight];
  const float inverse_rms = norm_scale(p, p.x + row * p.x_stride);
  float v[kHadamardDim];
  for (int64_t block = begin; block < end; ++block) {
    input_block(p, ref, row, inverse_rms, block, v);
    quantise(v, ref, w, w.q + row * p.k + block * kHadamardDim,
             w.meta + row * (p.k / kHadamardDim) + block);
  }
}

void linear_words(const LinearStrips& s) {
  const int64_t blocks = s.k / kHadamardDim;
  const int64_t tile_words = 16 * s.bits;
  const int16_t* table = value_table(s.codebook);
  int16_t v[8][16][16];
  for (int64_t strip = s.begin; strip < s.end; ++strip) {
    const uint16_t* planes = s.planes + strip * (s.k / kTileDim) * tile_words;
    for (int64_t row0 = 0; row0 < s.m; row0 += 16) {
      const int rows = static_cast<int>(s.m - row0 < 16 ? s.m - row0 : 16);
      float acc[16][16] = {};
      float base[16] = {};
      for (int64_t block = 0; block < blocks; ++block) {
        for (int tile = 0; tile < 8; ++tile) {
          tile_values(planes + (8 * block + tile) * tile_words, s.bits, table, v[tile]);
        }
        for (int r = 0; r < rows; ++r) {
          const int16_t* q = s.q + (row0 + r) * s.k + block * kHadamardDim;
          const LinearBlockMeta& meta = s.meta[(row0 + r) * blocks + block];
          base[r] += meta.offset;
          for (int c = 0; c < 16; ++c) {
            const float sum = static_cast<float>(block_sum(v, c, q, meta.init));
            acc[r][c] = std::fma(sum, meta.scale, acc[r][c]);
          }
        }
      }
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < 16; ++c) {
          inner_at(s, strip, row0 + r)[c] = acc[r][c] + base[r];
        }
      }
    }
  }
}

void linear_epilogue(const LinearParams& p, const LinearPlan& plan, int weight, int64_t block) {
  const bool gated = p.activation >= 0;
  const int64_t first = block * kHadamardDim;
  int64_t start = first;  // column of y
  for (int i = 0; i < weight && !gated; ++i) start += p.w[i].out_features;
  int64_t columns = p.w[weight].out_features - first;
  columns = columns < 0 ? 0 : (columns < kHadamardDim ? columns : kHadamardDim);
  float v[2][kHadamardDim];
  for (int64_t row = 0; row < p.m; ++row) {
    for (int g = 0; g < (gated ? 2 : 1); ++g) {
      const int i = gated ? g : weight;
      const LinearWeightRef& ref = p.w[i];
      for (int c = 0; c < kHadamardDim; ++c) {
        const int64_t strip = (first + c) / kTileDim;
        v[g][c] = plan.w[i].inner[(strip * p.m + row) * kTileDim + c % kTileDim];
      }
      hadamard(v[g]);
      for (int64_t c = 0; c < columns; ++c) {
        v[g][c] *= kHadamardNorm * half_to_float(ref.svh[first + c]);
        if (ref.bias) v[g][c] += ref.bias[first + c];
      }
    }
    float* y = p.y + row * p.y_stride + start;
    for (int64_t c = 0; c < columns; ++c) {
      float value =
          gated ? activate(static_cast<Activation>(p.activation), v[0][c]) * v[1][c] : v[0][c];
      if (p.residual) value += p.residual[row * p.residual_stride + start + c];
      y[c] = value;
    }
  }
}

}  // namespace exl3::generic
