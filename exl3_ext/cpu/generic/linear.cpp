// Linear layer: the prologue, the inner product and the epilogue in plain C++. The integer parts
// are what faster levels must match bit for bit.
#include "cpu/generic/linear.h"

#include <cmath>

#include "cpu/generic/half.h"
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
  int32_t sum[2] = {0, 0};
  for (int i = 0; i < kHadamardDim; ++i) {
    const int position = i & 15, place = i & ~15;
    // position = 2j + {0, 1, 8, 9}[e]
    const int e = (position & 1) + 2 * (position >> 3), j = (position >> 1) & 3;
    const int value = finite ? static_cast<int>(std::lrintf(v[i] * inverse)) : 0;
    sum[(position >> 2) & 1] += value;
    q[place + 4 * e + j] = static_cast<int16_t>(twice ? (value & 255) * 257 : value);
  }
  const LinearScale scale = linear_scale(ref.codebook);
  const float unit = (peak < kTiny ? 0.0f : peak / q_max) * kHadamardNorm;
  meta->scale = unit * scale.step;
  meta->offset = unit * scale.zero * static_cast<float>(sum[0] + sum[1]);
  meta->init[0] = -scale.centre * sum[0];
  meta->init[1] = -scale.centre * sum[1];
}

// Bytes of the lane planes of one tile (trellis.h) -> the 16 bits that end with bit
// bits * (e + 1) of lane t.
uint32_t lane_state(const uint16_t* tile, int bits, int t, int e) {
  const auto byte = [&](int j) {  // byte j of lane t's stream, j < 0: of the lanes before
    const int lane = (t + (j < 0 ? (j - bits + 1) / bits : 0)) & 31;
    j = j < 0 ? (j % bits + bits) % bits : j;
    if (j == bits - 1 && bits % 2 == 1) {
      return static_cast<uint32_t>(reinterpret_cast<const uint8_t*>(tile + 32 * (bits / 2))[lane]);
    }
    const uint32_t word = tile[32 * (j / 2) + lane];
    return j % 2 == 0 ? word >> 8 : word & 255;
  };
  const int end = bits * (e + 1);
  const int last = (end + 7) / 8 - 1;  // the byte that holds the window's last bit
  const uint32_t window = byte(last - 2) << 16 | byte(last - 1) << 8 | byte(last);
  return window >> (8 * (last + 1) - end) & 0xFFFF;
}

// A float16 of exponent field 12..15, as an integer multiple of 2^-13.
int fixed_point(uint32_t half) {
  const int magnitude = static_cast<int>((half & 0x3FF) | 0x400) << (((half >> 10) & 31) - 12);
  return half & 0x8000 ? -magnitude : magnitude;
}

int weight_value(Codebook codebook, uint32_t state) {
  if (codebook == Codebook::kMul1) return static_cast<int>(mul1_byte_sum(state));
  const uint32_t pair = half_pair(codebook, state);
  return fixed_point(pair & 0xFFFF) + fixed_point(pair >> 16);
}

// v of one tile, [16 columns][16 inputs in the order of q].
void tile_values(const uint16_t* tile, int bits, Codebook codebook, int16_t (*v)[16]) {
  for (int t = 0; t < 32; ++t) {
    for (int e = 0; e < 8; ++e) {
      v[t / 4 + 8 * (e / 4)][4 * (e % 4) + t % 4] =
          static_cast<int16_t>(weight_value(codebook, lane_state(tile, bits, t, e)));
    }
  }
}

// Sums of the two halves of one 128-block for one row and column, modulo 2^32 as in registers.
void block_sums(const int16_t (*v)[16][16], int column, const int16_t* q,
                const LinearBlockMeta& meta, int32_t* sum) {
  uint32_t s[2] = {static_cast<uint32_t>(meta.init[0]), static_cast<uint32_t>(meta.init[1])};
  for (int tile = 0; tile < 8; ++tile) {
    for (int i = 0; i < 16; ++i) {
      s[(i >> 1) & 1] += static_cast<uint32_t>(v[tile][column][i] * q[16 * tile + i]);
    }
  }
  sum[0] = static_cast<int32_t>(s[0]);
  sum[1] = static_cast<int32_t>(s[1]);
}

float activate(int kind, float x) {
  switch (kind) {
    case 0:
      return x / (1.0f + std::exp(-x));
    case 1:
      return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
    case 2:
      return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    default:
      return x > 0.0f || x != x ? x : 0.0f;
  }
}

}  // namespace

void linear_prologue(const LinearParams& p, const LinearWeightPlan& w, int weight, int64_t row,
                     int64_t begin, int64_t end) {
  const float* x = p.x + row * p.x_stride;
  const float inverse_rms = norm_scale(p, x);
  const LinearWeightRef& ref = p.w[weight];
  float v[kHadamardDim];
  for (int64_t block = begin; block < end; ++block) {
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
    quantise(v, ref, w, w.q + row * p.k + block * kHadamardDim,
             w.meta + row * (p.k / kHadamardDim) + block);
  }
}

void linear_words(const LinearStrips& s) {
  const int64_t blocks = s.k / kHadamardDim;
  const int64_t tile_words = 16 * s.bits;
  int16_t v[8][16][16];
  for (int64_t strip = s.begin; strip < s.end; ++strip) {
    const uint16_t* planes = s.planes + strip * (s.k / kTileDim) * tile_words;
    for (int64_t row0 = 0; row0 < s.m; row0 += 16) {
      const int rows = static_cast<int>(s.m - row0 < 16 ? s.m - row0 : 16);
      float acc[16][16][2] = {};
      float base[16] = {};
      for (int64_t block = 0; block < blocks; ++block) {
        for (int tile = 0; tile < 8; ++tile) {
          tile_values(planes + (8 * block + tile) * tile_words, s.bits, s.codebook, v[tile]);
        }
        for (int r = 0; r < rows; ++r) {
          const int16_t* q = s.q + (row0 + r) * s.k + block * kHadamardDim;
          const LinearBlockMeta& meta = s.meta[(row0 + r) * blocks + block];
          base[r] += meta.offset;
          for (int c = 0; c < 16; ++c) {
            int32_t sum[2];
            block_sums(v, c, q, meta, sum);
            for (int h = 0; h < 2; ++h) {
              acc[r][c][h] = std::fma(static_cast<float>(sum[h]), meta.scale, acc[r][c][h]);
            }
          }
        }
      }
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < 16; ++c) {
          s.inner[(row0 + r) * s.n + 16 * strip + c] = acc[r][c][0] + acc[r][c][1] + base[r];
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
      const float* inner = plan.w[i].inner + row * ref.n + first;
      for (int c = 0; c < kHadamardDim; ++c) v[g][c] = inner[c];
      hadamard(v[g]);
      for (int64_t c = 0; c < columns; ++c) {
        v[g][c] *= kHadamardNorm * half_to_float(ref.svh[first + c]);
        if (ref.bias) v[g][c] += ref.bias[first + c];
      }
    }
    float* y = p.y + row * p.y_stride + start;
    for (int64_t c = 0; c < columns; ++c) {
      float value = gated ? activate(p.activation, v[0][c]) * v[1][c] : v[0][c];
      if (p.residual) value += p.residual[row * p.residual_stride + start + c];
      y[c] = value;
    }
  }
}

}  // namespace exl3::generic
