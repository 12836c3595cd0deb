#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

// index[i] = the lowest column < valid with the greatest value of row i. NaN is less than all else;
// a row of nothing but NaN gives 0.
struct ArgmaxParams {
  const float* x;  // [rows, >= valid], rows x_stride apart
  int64_t* index;  // [rows]
  int64_t rows, valid, x_stride;
};

Status argmax_cpu(const ArgmaxParams& p);

}  // namespace exl3
