// Linear layer: prologue and epilogue, one 128-block in eight registers. About 250 instructions a
// block: small beside the product (a block of inputs meets hundreds of columns).
#include "cpu/avx512/linear.h"

#include "cpu/avx512/activate_inl.h"
#include "cpu/avx512/hadamard_inl.h"

namespace exl3::avx512 {
namespace {

constexpr int kVectors = kHadamardDim / 16;
constexpr float kTiny = 1e-30f;  // blocks below count as zero, as in the generic level

// First min(count, 16) lanes; none for count <= 0.
EXL3_STATIC __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xFFFF : (count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1));
}

// 1 / rms of a row, or 1 without a norm.
float norm_scale(const LinearParams& p, const float* x) {
  if (!p.norm_weight) return 1.0f;
  __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t i = 0; i < p.in_features; i += 32) {
    const __m512 a = _mm512_maskz_loadu_ps(first_lanes(p.in_features - i), x + i);
    const __m512 b = _mm512_maskz_loadu_ps(first_lanes(p.in_features - i - 16), x + i + 16);
    sum[0] = _mm512_fmadd_ps(a, a, sum[0]);
    sum[1] = _mm512_fmadd_ps(b, b, sum[1]);
  }
  const float total = _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
  return 1.0f / sqrtf(total / static_cast<float>(p.in_features) + p.norm_eps);
}

// (x normed) * suh of one block; inputs past in_features are zero.
EXL3_STATIC void load_block(const LinearParams& p, const float* x, const half_bits* suh,
                            float inverse_rms, int64_t block, __m512* v) {
#pragma GCC unroll 8
  for (int r = 0; r < kVectors; ++r) {
    const int64_t at = block * kHadamardDim + 16 * r;
    const __mmask16 mask = first_lanes(p.in_features - at);
    __m512 value = _mm512_maskz_loadu_ps(mask, x + at);
    if (p.norm_weight) {
      const __m512 weight = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, p.norm_weight + at),
                                          _mm512_set1_ps(p.norm_offset));
      value = _mm512_mul_ps(_mm512_mul_ps(value, _mm512_set1_ps(inverse_rms)), weight);
    }
    v[r] = _mm512_maskz_mul_ps(mask, value, load16_half(suh + at));
  }
}

// 16 quantised inputs of a tile -> (e, j) order, input 2j + {0, 1, 8, 9}[e], as int16 or as an
// int8 twice.
EXL3_STATIC void store_tile(int16_t* q, __m512i values, bool twice) {
  const __m512i order = _mm512_set_epi32(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0);
  __m256i words = _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(order, values));
  if (twice) {
    words = _mm256_and_si256(words, _mm256_set1_epi16(255));
    words = _mm256_or_si256(words, _mm256_slli_epi16(words, 8));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), words);
}

EXL3_STATIC void quantise(__m512* v, const LinearWeightRef& ref, const LinearWeightPlan& w,
                          int16_t* q, LinearBlockMeta* meta) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i top = _mm512_setzero_si512();  // as bits: NaN above infinity above numbers
#pragma GCC unroll 8
  for (int r = 0; r < kVectors; ++r) {
    top = _mm512_max_epu32(top, _mm512_and_si512(_mm512_castps_si512(v[r]), magnitude));
  }
  const uint32_t peak_bits = _mm512_reduce_max_epu32(top);
  float peak;
  __builtin_memcpy(&peak, &peak_bits, 4);
  const float q_max = static_cast<float>(w.choice.q_max);
  const __m512 inverse = _mm512_set1_ps(peak < kTiny ? 0.0f : q_max / peak);
  const __mmask16 finite = peak_bits < 0x7F800000 ? 0xFFFF : 0;
  const bool twice = w.choice.kernel == LinearKernel::kBytes;
  __m512i sums = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int r = 0; r < kVectors; ++r) {
    const __m512i values = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(v[r], inverse));
    sums = _mm512_add_epi32(sums, values);
    store_tile(q + 16 * r, values, twice);
  }
  // Inputs with (input / 4) % 2 == 0, and the others.
  const int sum0 = _mm512_mask_reduce_add_epi32(0x0F0F, sums);
  const int sum1 = _mm512_mask_reduce_add_epi32(0xF0F0, sums);
  const LinearScale scale = linear_scale(ref.codebook);
  const float unit = (peak < kTiny ? 0.0f : peak / q_max) * kHadamardNorm;
  meta->scale = unit * scale.step;
  meta->offset = unit * scale.zero * static_cast<float>(sum0 + sum1);
  meta->init[0] = -scale.centre * sum0;
  meta->init[1] = -scale.centre * sum1;
}

// 128 outputs of one weight and row, bias included; columns past `columns` are not meaningful.
EXL3_STATIC void output_block(const LinearWeightRef& ref, const float* inner, int64_t first,
                              int64_t columns, __m512* v) {
#pragma GCC unroll 8
  for (int r = 0; r < kVectors; ++r) v[r] = _mm512_loadu_ps(inner + 16 * r);
  hadamard128(v);
#pragma GCC unroll 8
  for (int r = 0; r < kVectors; ++r) {
    const __m512 svh = load16_half(ref.svh + first + 16 * r);
    v[r] = _mm512_mul_ps(v[r], _mm512_mul_ps(svh, _mm512_set1_ps(kHadamardNorm)));
    if (ref.bias) {
      const __mmask16 mask = first_lanes(columns - 16 * r);
      v[r] = _mm512_add_ps(v[r], _mm512_maskz_loadu_ps(mask, ref.bias + first + 16 * r));
    }
  }
}

}  // namespace

void fill_linear(KernelTable& t) {
  t.linear_prologue = linear_prologue;
  t.linear_words = linear_words;
  t.linear_bytes = linear_bytes;
  t.linear_epilogue = linear_epilogue;
}

void linear_prologue(const LinearParams& p, const LinearWeightPlan& w, int weight, int64_t row,
                     int64_t begin, int64_t end) {
  const float* x = p.x + row * p.x_stride;
  const float inverse_rms = norm_scale(p, x);
  const LinearWeightRef& ref = p.w[weight];
  for (int64_t block = begin; block < end; ++block) {
    __m512 v[kVectors];
    load_block(p, x, ref.suh, inverse_rms, block, v);
    hadamard128(v);
    quantise(v, ref, w, w.q + row * p.k + block * kHadamardDim,
             w.meta + row * (p.k / kHadamardDim) + block);
  }
}

void linear_epilogue(const LinearParams& p, const LinearPlan& plan, int weight, int64_t block) {
  const bool gated = p.activation >= 0;
  const int first_weight = gated ? 0 : weight;
  const int64_t first = block * kHadamardDim;
  int64_t start = first;  // column of y
  for (int i = 0; i < first_weight; ++i) start += p.w[i].out_features;
  const int64_t columns = p.w[weight].out_features - first;
  for (int64_t row = 0; row < p.m; ++row) {
    __m512 v[kVectors], up[kVectors];
    const LinearWeightRef& ref = p.w[first_weight];
    output_block(ref, plan.w[first_weight].inner + row * ref.n + first, first, columns, v);
    if (gated) {
      output_block(p.w[1], plan.w[1].inner + row * p.w[1].n + first, first, columns, up);
    }
    float* y = p.y + row * p.y_stride + start;
    const float* residual = p.residual ? p.residual + row * p.residual_stride + start : nullptr;
    for (int r = 0; r < kVectors; ++r) {
      const __mmask16 mask = first_lanes(columns - 16 * r);
      __m512 value = gated ? _mm512_mul_ps(activate_ps(p.activation, v[r]), up[r]) : v[r];
      if (residual) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, residual + 16 * r));
      _mm512_mask_storeu_ps(y + 16 * r, mask, value);
    }
  }
}

}  // namespace exl3::avx512
