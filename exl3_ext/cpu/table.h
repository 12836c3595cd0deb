// The table of CPU kernels. Each level of instructions fills the entries it has; an empty entry
// falls to the level below; `generic` is complete. Entries work on a range of rows or tiles and run
// inside one task; launchers (cpu/<op>.cpp) split the work and call them.
#pragma once
#include "cpu/isa.h"
#include "exl3/types.h"

namespace exl3 {

struct EncodeStep;
struct EncodeCoarseStep;
struct HadamardParams;
struct TrellisDecodeParams;
struct TrellisPackParams;
struct TrellisPlanesParams;
struct LinearParams;
struct LinearPlan;
struct LinearStrips;
struct LinearWeightPlan;
struct RopeTableParams;
struct LowRankBlock;
struct LowRankInner;
struct LowRankParams;
struct AttentionTask;
struct AttentionMerge;

// Also of float16 on CUDA.
template <class T>
struct RmsNorm;
template <class T>
struct GatedActivation;
template <class T>
struct Embedding;
template <class T>
struct Argmax;
template <class T>
struct RopeAppend;
template <class T>
struct Attention;

using RmsNormParams = RmsNorm<float>;
using GatedActivationParams = GatedActivation<float>;
using EmbeddingParams = Embedding<float>;
using ArgmaxParams = Argmax<float>;
using RopeAppendParams = RopeAppend<float>;
using AttentionParams = Attention<float>;

struct KernelTable {
  // One step of the trellis search of some tiles.
  void (*encode_step)(EncodeStep& s) = nullptr;
  void (*encode_coarse_step)(EncodeCoarseStep& s) = nullptr;
  // Rows [begin, end) of a block-diagonal Hadamard transform.
  void (*hadamard_rows)(const HadamardParams& p, int64_t begin, int64_t end) = nullptr;
  // Tiles [begin, end).
  void (*trellis_pack)(const TrellisPackParams& p, int64_t begin, int64_t end) = nullptr;
  void (*trellis_unpack)(const TrellisPackParams& p, int64_t begin, int64_t end) = nullptr;
  // Rows [begin, end) of tiles, counted over the batch.
  void (*trellis_decode)(const TrellisDecodeParams& p, int64_t begin, int64_t end) = nullptr;
  // Strips [begin, end), counted over the batch.
  void (*trellis_prepare)(const TrellisPlanesParams& p, int64_t begin, int64_t end) = nullptr;
  void (*trellis_restore)(const TrellisPlanesParams& p, int64_t begin, int64_t end) = nullptr;

  // Linear layer: input 128-blocks [begin, end) of a row, transformed and quantised for a weight;
  // strips of the inner product, in words, bytes, tiles for some rows or for many; one 128-block of
  // outputs.
  void (*linear_prologue)(const LinearParams& p, const LinearWeightPlan& w, int weight, int64_t row,
                          int64_t begin, int64_t end) = nullptr;
  void (*linear_words)(const LinearStrips& s) = nullptr;
  void (*linear_bytes)(const LinearStrips& s) = nullptr;
  void (*linear_tiles)(const LinearStrips& s) = nullptr;
  void (*linear_many)(const LinearStrips& s) = nullptr;
  void (*linear_epilogue)(const LinearParams& p, const LinearPlan& plan, int weight,
                          int64_t block) = nullptr;

  // Rows [begin, end).
  void (*rms_norm_rows)(const RmsNormParams& p, int64_t begin, int64_t end) = nullptr;
  void (*embedding_rows)(const EmbeddingParams& p, int64_t begin, int64_t end) = nullptr;
  void (*argmax_rows)(const ArgmaxParams& p, int64_t begin, int64_t end) = nullptr;
  void (*rope_table_rows)(const RopeTableParams& p, int64_t begin, int64_t end) = nullptr;
  void (*rope_append_rows)(const RopeAppendParams& p, int64_t begin, int64_t end) = nullptr;
  // Elements [begin, end) of the result, counted row by row.
  void (*gated_activation_span)(const GatedActivationParams& p, int64_t begin,
                                int64_t end) = nullptr;

  // Inner products of some rows and ranks; one block of columns of some rows.
  void (*low_rank_inner)(const LowRankParams& p, const LowRankInner& t) = nullptr;
  void (*low_rank_block)(const LowRankParams& p, const LowRankBlock& b) = nullptr;

  // One task of attention; `scratch` is attention_scratch(p) floats, aligned to 64 bytes.
  void (*attention_task)(const AttentionParams& p, const AttentionTask& t, float* partial,
                         float* scratch) = nullptr;
  void (*attention_merge)(const AttentionParams& p, const AttentionMerge& m,
                          float* partial) = nullptr;
};

void fill_generic(KernelTable& t);
#if defined(__x86_64__)
void fill_avx2(KernelTable& t);
void fill_avx512(KernelTable& t);
void fill_amx(KernelTable& t);
#endif

const KernelTable& kernels();  // of the active level

}  // namespace exl3
