#pragma once
#include "exl3/status.h"
#include "exl3/types.h"

namespace exl3 {

// Packed tiles <-> states. A tile has 256 states and 16*bits words as stored in files.
struct TrellisPackParams {
  int32_t* states;    // [tiles, 256] in position order; pack reads the low `bits` bits of each
  uint16_t* trellis;  // [tiles, 16*bits]
  int64_t tiles;
  int bits;
};
Status trellis_pack_cpu(const TrellisPackParams& p);    // states -> trellis
Status trellis_unpack_cpu(const TrellisPackParams& p);  // trellis -> states, 0..65535

// The exact float16 inner weight W'.
struct TrellisDecodeParams {
  const uint16_t* trellis;  // [batch, k/16, n/16, 16*bits]
  half_bits* w;             // [batch, k, n], overwritten
  int64_t batch, k, n;      // k, n multiples of 16
  int bits;
  Codebook codebook;
};
Status trellis_decode_cpu(const TrellisDecodeParams& p);

// File layout <-> lane planes, the layout that CPU kernels read. Strip j, the 16 output columns
// 16j..16j+15, holds its k/16 tiles one after another. In a tile, lane t (0..31) owns the stream
// bytes B[0..bits-1][t], those of positions 8t..8t+7:
//   plane w = 0 .. bits/2 - 1   32 uint16   B[2w][t] << 8 | B[2w + 1][t]
//   if bits is odd, last        32 bytes    B[bits - 1][t]
// So one 512-bit load holds the same 16 stream bits of all lanes.
struct TrellisPlanesParams {
  const uint16_t* from;
  uint16_t* to;
  int64_t batch, k_tiles, n_tiles;
  int bits;
};
Status trellis_prepare_cpu(
    const TrellisPlanesParams& p);  // [b, kt, nt, 16*bits] -> [b, nt, kt, ..]
Status trellis_restore_cpu(const TrellisPlanesParams& p);  // the inverse

Status trellis_pack_cuda(const TrellisPackParams& p, CudaStream stream);
Status trellis_unpack_cuda(const TrellisPackParams& p, CudaStream stream);
Status trellis_decode_cuda(const TrellisDecodeParams& p, CudaStream stream);

// On CUDA the planes are "lane words", in as many bytes: four tiles side by side (64 outputs) make
// a group, and lane t of a warp owns the bits of positions 8t..8t+7 of each, 32*bits in all, as
// `bits` uint32 words, tile 0 first, most significant bit first. v of them are loaded at once, v =
// 4, 2 or 1 the largest that divides bits:  uint32 [n/64][k/16][bits/v][32 lanes][v].  n_tiles % 4
// == 0.
Status trellis_prepare_cuda(const TrellisPlanesParams& p, CudaStream stream);
Status trellis_restore_cuda(const TrellisPlanesParams& p, CudaStream stream);

// W' of whole groups of lane words.
struct PlanesDecodeParams {
  const uint32_t* words;  // [n/64][k/16][32*bits]
  half_bits* w;           // [k, n], overwritten
  int64_t k, n;           // k a multiple of 128, n of 64
  int bits;
  Codebook codebook;
};
Status planes_decode_cuda(const PlanesDecodeParams& p, CudaStream stream);

}  // namespace exl3
