// Tail-biting Viterbi search, every node of every step.
#include "cpu/generic/encode.h"

#include <cstring>

#include "exl3/codebook.h"

namespace exl3::generic {
namespace {

constexpr float kUnreached = 1e30f;

template <int K>
struct Search {
  static constexpr int kNodes = kStates >> K;
  static constexpr int kFan = 1 << K;
  const float* codebook;
  float* cost;  // [257][kNodes]: before each step, after the last

  // One step: the costs of the nodes after position value w.
  void step(const float* before, float w, float* after) const {
    for (int h = 0; h < kFan; ++h) {
      const float* c = codebook + h * kNodes;
      for (int next = 0; next < kNodes; next += kFan) {
        const float base = before[(h * kNodes + next) >> K];
        for (int i = 0; i < kFan; ++i) {
          const float d = c[next + i] - w;
          const float total = base + d * d;
          const float best = h == 0 ? kUnreached : after[next + i];
          after[next + i] = total < best ? total : best;
        }
      }
    }
  }

  void normalise(float* row) const {
    float low = row[0];
    for (int i = 1; i < kNodes; ++i) low = row[i] < low ? row[i] : low;
    for (int i = 0; i < kNodes; ++i) row[i] -= low;
  }

  // states[i] for positions first..first+count-1 (mod 256), ending in node `end` (-1: the best).
  void run(const float* w, int first, int count, int start, int end, int* states) {
    for (int i = 0; i < kNodes; ++i) cost[i] = start < 0 || i == start ? 0.0f : kUnreached;
    for (int s = 0; s < count; ++s) {
      float* row = cost + int64_t{s} * kNodes;
      step(row, w[(first + s) & 255], row + kNodes);
      normalise(row + kNodes);
    }
    if (end < 0) {
      const float* row = cost + int64_t{count} * kNodes;
      end = 0;
      for (int i = 1; i < kNodes; ++i) end = row[i] < row[end] ? i : end;
    }
    for (int s = count - 1; s >= 0; --s) {
      const float* row = cost + int64_t{s} * kNodes;
      int best = end;
      float low = 3e38f;
      for (int h = 0; h < kFan; ++h) {
        const int state = h * kNodes + end;
        const float d = codebook[state] - w[(first + s) & 255];
        const float total = row[state >> K] + d * d;
        if (total < low) {
          low = total;
          best = state;
        }
      }
      states[(first + s) & 255] = best;
      end = best >> K;
    }
  }

  void tile(const float* w, uint16_t* trellis, float* values) {
    int states[kTileNumel];
    run(w, 128, kTileNumel, -1, -1, states);
    const int node = states[0] >> K;
    run(w, 0, kTileNumel, node, node, states);
    std::memset(trellis, 0, sizeof(uint16_t) * 16 * K);
    for (int p = 0; p < kTileNumel; ++p) {
      values[p] = codebook[states[p]];
      for (int b = 0; b < K; ++b) {
        const int at = p * K + b;
        const int bit = (states[p] >> (K - 1 - b)) & 1;
        trellis[stored_word(at >> 4)] |= static_cast<uint16_t>(bit << (15 - (at & 15)));
      }
    }
  }
};

template <int K>
void encode(const EncodeParams& p, int64_t begin, int64_t end, unsigned char* workspace) {
  Search<K> search{p.codebook, reinterpret_cast<float*>(workspace)};
  for (int64_t t = begin; t < end; ++t)
    search.tile(p.tiles + t * kTileNumel, p.trellis + t * 16 * K, p.values + t * kTileNumel);
}

}  // namespace

void encode_tiles(const EncodeParams& p, int64_t begin, int64_t end, unsigned char* workspace) {
  using Fn = void (*)(const EncodeParams&, int64_t, int64_t, unsigned char*);
  static constexpr Fn kByBits[] = {encode<1>, encode<2>, encode<3>, encode<4>,
                                   encode<5>, encode<6>, encode<7>, encode<8>};
  kByBits[p.bits - 1](p, begin, end, workspace);
}

}  // namespace exl3::generic
