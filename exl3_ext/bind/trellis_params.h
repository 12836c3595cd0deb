// Argument checks and outputs of the trellis ops, the same on every device.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <utility>
#include <vector>

#include "bind/check.h"
#include "exl3/trellis.h"

namespace exl3::bind {

inline int check_bits(const char* op, int64_t bits) {
  EXL3_CHECK(op, bits >= 1 && bits <= 8, "bits is ", bits, ", expected 1..8");
  return static_cast<int>(bits);
}

// bits of a packed tensor (..., 16*bits)
inline int bits_of(const char* op, const Tensor& trellis, int64_t dims) {
  EXL3_CHECK_DTYPE(op, trellis, Short);
  EXL3_CHECK_CONTIGUOUS(op, trellis);
  EXL3_CHECK(op, trellis.dim() >= dims, "trellis has ", trellis.dim(), " dims, expected at least ",
             dims);
  const int64_t words = trellis.size(trellis.dim() - 1);
  EXL3_CHECK(op, words % 16 == 0, "trellis.size(-1) is ", words, ", expected a multiple of 16");
  return check_bits(op, words / 16);
}

inline Codebook check_codebook(const char* op, int64_t codebook) {
  EXL3_CHECK(op, codebook >= 0 && codebook < kCodebooks, "codebook is ", codebook,
             ", expected 0, 1 or 2");
  return static_cast<Codebook>(codebook);
}

inline std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < t.dim(); ++d) sizes.push_back(t.size(d));
  return sizes;
}

inline int64_t product(const std::vector<int64_t>& sizes, size_t count) {
  int64_t n = 1;
  for (size_t i = 0; i < count; ++i) n *= sizes[i];
  return n;
}

// Each fills *p and returns the output.
inline Tensor pack_params(const Tensor& states, int64_t bits, TrellisPackParams* p) {
  const char* op = "trellis_pack";
  EXL3_CHECK_DTYPE(op, states, Int);
  EXL3_CHECK_CONTIGUOUS(op, states);
  EXL3_CHECK(op, states.dim() >= 1, "states has no dims");
  EXL3_CHECK_SIZE(op, states, states.dim() - 1, kTileNumel);
  std::vector<int64_t> sizes = sizes_of(states);
  sizes.back() = 16 * check_bits(op, bits);
  Tensor trellis = torch::stable::new_empty(states, sizes, ScalarType::Short);
  p->states = data_mut<int32_t>(states);
  p->trellis = data_mut<uint16_t>(trellis);
  p->tiles = states.numel() / kTileNumel;
  p->bits = static_cast<int>(bits);
  return trellis;
}

inline Tensor unpack_params(const Tensor& trellis, TrellisPackParams* p) {
  p->bits = bits_of("trellis_unpack", trellis, 1);
  std::vector<int64_t> sizes = sizes_of(trellis);
  sizes.back() = kTileNumel;
  Tensor states = torch::stable::new_empty(trellis, sizes, ScalarType::Int);
  p->states = data_mut<int32_t>(states);
  p->trellis = data_mut<uint16_t>(trellis);
  p->tiles = states.numel() / kTileNumel;
  return states;
}

inline Tensor decode_params(const Tensor& trellis, int64_t codebook, TrellisDecodeParams* p) {
  const char* op = "trellis_decode";
  p->bits = bits_of(op, trellis, 3);
  p->codebook = check_codebook(op, codebook);
  std::vector<int64_t> sizes = sizes_of(trellis);
  sizes.pop_back();
  const size_t dims = sizes.size();
  p->batch = product(sizes, dims - 2);
  p->n = sizes[dims - 1] *= kTileDim;
  p->k = sizes[dims - 2] *= kTileDim;
  Tensor w = torch::stable::new_empty(trellis, sizes, ScalarType::Half);
  p->trellis = data<uint16_t>(trellis);
  p->w = data_mut<half_bits>(w);
  return w;
}

// Both directions swap the two tile dims.
inline Tensor planes_params(const char* op, const Tensor& from, bool prepare,
                            TrellisPlanesParams* p) {
  p->bits = bits_of(op, from, 3);
  std::vector<int64_t> sizes = sizes_of(from);
  const size_t dims = sizes.size();
  p->batch = product(sizes, dims - 3);
  p->k_tiles = sizes[prepare ? dims - 3 : dims - 2];
  p->n_tiles = sizes[prepare ? dims - 2 : dims - 3];
  std::swap(sizes[dims - 3], sizes[dims - 2]);
  Tensor to = torch::stable::new_empty(from, sizes);
  p->from = data<uint16_t>(from);
  p->to = data_mut<uint16_t>(to);
  return to;
}

}  // namespace exl3::bind
