#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

// y[i] = table[ids[i]] * scale. An id outside [0, vocab) is kOutOfRange and nothing is written.
struct EmbeddingParams {
  const int64_t* ids;  // [rows]
  const void* table;   // [vocab, dim] row-major, dtype
  float* y;            // [rows, dim] row-major
  int64_t rows, vocab, dim;
  DType dtype;
  float scale;
};

Status embedding_cpu(const EmbeddingParams& p);

}  // namespace exl3
