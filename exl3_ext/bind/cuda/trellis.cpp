#include "exl3/trellis.h"

#include <torch/csrc/stable/library.h>

#include "bind/cuda/guard.h"
#include "bind/trellis_params.h"

namespace exl3::bind {
namespace {

Tensor trellis_pack(const Tensor& states, int64_t bits) {
  TrellisPackParams p{};
  Tensor trellis = pack_params(states, bits, &p);
  CudaLaunch(states).run("trellis_pack", trellis_pack_cuda, p);
  return trellis;
}

Tensor trellis_unpack(const Tensor& trellis) {
  TrellisPackParams p{};
  Tensor states = unpack_params(trellis, &p);
  CudaLaunch(trellis).run("trellis_unpack", trellis_unpack_cuda, p);
  return states;
}

Tensor trellis_decode(const Tensor& trellis, int64_t codebook) {
  TrellisDecodeParams p{};
  Tensor w = decode_params(trellis, codebook, &p);
  CudaLaunch(trellis).run("trellis_decode", trellis_decode_cuda, p);
  return w;
}

Tensor reorder(const char* op, const Tensor& from, bool prepare) {
  TrellisPlanesParams p{};
  Tensor to = planes_params(op, from, prepare, &p);
  EXL3_CHECK(op, p.n_tiles % 4 == 0, "the tensor has ", p.n_tiles,
             " tiles of columns, expected a multiple of 4: pad to 64 columns");
  CudaLaunch(from).run(op, prepare ? trellis_prepare_cuda : trellis_restore_cuda, p);
  return to;
}

Tensor trellis_prepare(const Tensor& trellis) { return reorder("trellis_prepare", trellis, true); }
Tensor trellis_restore(const Tensor& planes) { return reorder("trellis_restore", planes, false); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) {
  m.impl("trellis_pack", TORCH_BOX(&trellis_pack));
  m.impl("trellis_unpack", TORCH_BOX(&trellis_unpack));
  m.impl("trellis_decode", TORCH_BOX(&trellis_decode));
  m.impl("trellis_prepare", TORCH_BOX(&trellis_prepare));
  m.impl("trellis_restore", TORCH_BOX(&trellis_restore));
}

}  // namespace exl3::bind
