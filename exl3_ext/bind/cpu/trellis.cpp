#include "exl3/trellis.h"

#include <torch/csrc/stable/library.h>

#include "bind/cpu/launch.h"
#include "bind/trellis_params.h"

namespace exl3::bind {
namespace {

Tensor trellis_pack(const Tensor& states, int64_t bits) {
  TrellisPackParams p{};
  Tensor trellis = pack_params(states, bits, &p);
  launch("trellis_pack", trellis_pack_cpu, p, {states, trellis});
  return trellis;
}

Tensor trellis_unpack(const Tensor& trellis) {
  TrellisPackParams p{};
  Tensor states = unpack_params(trellis, &p);
  launch("trellis_unpack", trellis_unpack_cpu, p, {trellis, states});
  return states;
}

Tensor trellis_decode(const Tensor& trellis, int64_t codebook) {
  TrellisDecodeParams p{};
  Tensor w = decode_params(trellis, codebook, &p);
  launch("trellis_decode", trellis_decode_cpu, p, {trellis, w});
  return w;
}

Tensor trellis_prepare(const Tensor& trellis) {
  TrellisPlanesParams p{};
  Tensor planes = planes_params("trellis_prepare", trellis, true, &p);
  launch("trellis_prepare", trellis_prepare_cpu, p, {trellis, planes});
  return planes;
}

Tensor trellis_restore(const Tensor& planes) {
  TrellisPlanesParams p{};
  Tensor trellis = planes_params("trellis_restore", planes, false, &p);
  launch("trellis_restore", trellis_restore_cpu, p, {planes, trellis});
  return trellis;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) {
  m.impl("trellis_pack", TORCH_BOX(&trellis_pack));
  m.impl("trellis_unpack", TORCH_BOX(&trellis_unpack));
  m.impl("trellis_decode", TORCH_BOX(&trellis_decode));
  m.impl("trellis_prepare", TORCH_BOX(&trellis_prepare));
  m.impl("trellis_restore", TORCH_BOX(&trellis_restore));
}

}  // namespace exl3::bind
