// The row-wise ops in plain C++.
#pragma once
#include "exl3/activation.h"
#include "exl3/embedding.h"
#include "exl3/norm.h"
#include "exl3/rope.h"
#include "exl3/sampling.h"

namespace exl3::generic {
float activate(Activation kind, float x);
void rms_norm_rows(const RmsNormParams& p, int64_t begin, int64_t end);
void gated_activation_span(const GatedActivationParams& p, int64_t begin, int64_t end);
void embedding_rows(const EmbeddingParams& p, int64_t begin, int64_t end);
void argmax_rows(const ArgmaxParams& p, int64_t begin, int64_t end);
void rope_table_rows(const RopeTableParams& p, int64_t begin, int64_t end);
void rope_append_rows(const RopeAppendParams& p, int64_t begin, int64_t end);
}  // namespace exl3::generic
