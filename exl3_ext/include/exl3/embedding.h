#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

// y[i] = table[ids[i]] * scale. An id outside [0, vocab) is kOutOfRange and nothing is written;
// on CUDA, which cannot report it without waiting, that row is NaN.
//
// T: float, or half_bits on CUDA; the CPU has float32 activations only.
template <class T>
struct Embedding {
  const int64_t* ids;  // [rows]
  const void* table;   // [vocab, dim] row-major, dtype
  T* y;                // [rows, dim] row-major
  int64_t rows, vocab, dim;
  DType dtype;
  float scale;
};
using EmbeddingParams = Embedding<float>;

Status embedding_cpu(const EmbeddingParams& p);
template <class T>
Status embedding_cuda(const Embedding<T>& p, CudaStream stream);

}  // namespace exl3
