#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

// index[i] = the lowest column < valid with the greatest value of row i. NaN is less than all else;
// a row of nothing but NaN gives 0.
//
// T: float, or half_bits on CUDA; the CPU has float32 activations only.
template <class T>
struct Argmax {
  const T* x;      // [rows, >= valid], rows x_stride apart
  int64_t* index;  // [rows]
  int64_t rows, valid, x_stride;
};
using ArgmaxParams = Argmax<float>;

Status argmax_cpu(const ArgmaxParams& p);
template <class T>
Status argmax_cuda(const Argmax<T>& p, CudaStream stream);

// A chain of sampler steps for each row, in the order of the interface page: bias and penalties,
// then up to eight steps that heat or cut, then the choice. exl3/ops/sampling.py fills these with
// numpy: the layouts must agree.
enum SampleKind : int32_t {
  kSampleTemperature = 1,    // value: T
  kSampleTopK = 2,           // value: k
  kSampleTopP = 3,           // value: what the sum of those kept may be at most
  kSampleTopPInclusive = 4,  // value: below it, the next one is kept
  kSampleMinP = 5,           // value: ln(min_p)
};
struct SampleStep {
  int64_t kind;
  double value;
};
constexpr int kSampleSteps = 8;

struct SampleRow {
  uint32_t key;                  // of the draw
  int32_t draw;                  // 1: Gumbel noise of `key`; 0: the greatest
  int32_t steps;                 // of `step` in use
  int32_t mask;                  // row of `masks`; below 0: all columns are allowed
  int32_t first, count;          // of `edits`
  double rep_p, freq_p, pres_p;  // 1, 0, 0: off
  SampleStep step[kSampleSteps];
};
static_assert(sizeof(SampleRow) == 176);

// What past tokens and biases do to one logit.
struct SampleEdit {
  int32_t id;
  float bias;                  // added first; -inf bans
  double rep, total, largest;  // factors of the penalties (api page, section 7)
  float before;                // room for the kernel: the logit as it came
  int32_t unused;
};
static_assert(sizeof(SampleEdit) == 40);

struct SampleParams {
  float* x;                // [rows, >= valid], rows x_stride apart; as it was on return
  const SampleRow* plans;  // [rows]
  SampleEdit* edits;
  const uint32_t* masks;  // [n_masks, (valid + 31) / 32], bit set: allowed
  int64_t* index;         // [rows]: the token; -1: none, or the row needs the host (NaN, infinity)
  int64_t rows, valid, x_stride, n_edits, n_masks;
};
Status sample_cuda(const SampleParams& p, CudaStream stream);

}  // namespace exl3
