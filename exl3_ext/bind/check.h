// Checks of bindings. An error says op, argument, expected and actual.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

#include "exl3/types.h"

namespace exl3::bind {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#define EXL3_CHECK(op, cond, ...) STD_TORCH_CHECK(cond, "exl3::", op, ": ", __VA_ARGS__)

#define EXL3_CHECK_DIM(op, t, n) \
  EXL3_CHECK(op, (t).dim() == (n), #t " has ", (t).dim(), " dims, expected ", (n))

#define EXL3_CHECK_SIZE(op, t, d, expected)                                                     \
  EXL3_CHECK(op, (t).size(d) == (expected), #t ".size(" #d ") is ", (t).size(d), ", expected ", \
             (expected), " (" #expected ")")

#define EXL3_CHECK_DTYPE(op, t, expected)                                     \
  EXL3_CHECK(op, (t).scalar_type() == ScalarType::expected, #t " has dtype ", \
             ::torch::headeronly::toString((t).scalar_type()), ", expected " #expected)

#define EXL3_CHECK_CONTIGUOUS(op, t) \
  EXL3_CHECK(op, (t).is_contiguous(), #t " is not contiguous; call .contiguous()")

#define EXL3_CHECK_CPU(op, t) EXL3_CHECK(op, (t).is_cpu(), #t " is not on the CPU")

#define EXL3_CHECK_SAME_DEVICE(op, t, other) \
  EXL3_CHECK(op, (t).device() == (other).device(), #t " and " #other " are on different devices")

// Contiguous CPU tensor of one dtype: what most arguments must be.
#define EXL3_CHECK_ARG(op, t, dtype) \
  do {                               \
    EXL3_CHECK_CPU(op, t);           \
    EXL3_CHECK_DTYPE(op, t, dtype);  \
    EXL3_CHECK_CONTIGUOUS(op, t);    \
  } while (0)

inline bool is_float(const Tensor& t) {
  const auto s = t.scalar_type();
  return s == ScalarType::Float || s == ScalarType::Half || s == ScalarType::BFloat16;
}

inline DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      return DType::kFloat32;
  }
}

template <class T>
const T* data(const Tensor& t) {
  return reinterpret_cast<const T*>(t.data_ptr());
}
template <class T>
T* data_mut(const Tensor& t) {
  return reinterpret_cast<T*>(t.data_ptr());
}

}  // namespace exl3::bind
