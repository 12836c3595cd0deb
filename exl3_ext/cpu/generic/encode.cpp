// One step of the trellis search (cpu/encode_step.h), plain loops over the 16 lanes of a row.
#include "cpu/generic/encode.h"

namespace exl3::generic {
namespace {

constexpr int kLanes = kEncodeLanes;

// best[i] = min(best[i], old + edge) for one row of the table. Short split loops, and no inlining
// of the first: GCC 12 at SSE2 then makes widening products (1.5 times as fast).
[[gnu::noinline]] void relax_tagged(int32_t old, const int16_t* table, const int16_t* y,
                                    int32_t* best) {
  int16_t first[kLanes], second[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    first[i] = table[2 * i];
    second[i] = table[2 * i + 1];
  }
  int32_t cost[kLanes];
  for (int i = 0; i < kLanes; ++i) cost[i] = int32_t{first[i]} * y[0] + int32_t{second[i]} * y[1];
  for (int i = 0; i < kLanes; ++i) {
    cost[i] += old;
    best[i] = cost[i] < best[i] ? cost[i] : best[i];
  }
}

inline void relax_square(int32_t old, const int16_t* table, int16_t y, int32_t* best) {
  int16_t d[kLanes];
  int32_t cost[kLanes];
  for (int i = 0; i < kLanes; ++i) d[i] = static_cast<int16_t>(table[2 * i] - y);
  for (int i = 0; i < kLanes; ++i) cost[i] = old + int32_t{d[i]} * d[i];
  for (int i = 0; i < kLanes; ++i) best[i] = cost[i] < best[i] ? cost[i] : best[i];
}

template <int K>
void step(const int16_t* table, EncodeStep::Tile& t) {
  constexpr int kNodes = kStates >> K, kFan = 1 << K, kOld = kNodes >> K;
  constexpr bool kTagged = K == kEncodeTaggedBits;
  const int32_t cap = kEncodeCap, keep = encode_keep(K), shift = encode_shift(K, t.low);
  int32_t low = cap;
  for (int row = 0; row < kNodes / kLanes; ++row) {
    int32_t best[kLanes];
    for (int i = 0; i < kLanes; ++i) best[i] = cap + shift;
    const int first = row >> (K - 4);
    for (int h = 0; h < kFan; ++h) {
      const int32_t old = t.before[h * kOld + first];
      if constexpr (kTagged)
        relax_tagged(old, table, t.y, best);
      else
        relax_square(old, table, t.y[0], best);
      table += 2 * kLanes;
    }
    for (int bit = 0; kTagged && bit < K; ++bit) {
      unsigned mask = 0;
      for (int i = 0; i < kLanes; ++i) mask |= (best[i] >> bit & 1u) << i;
      t.choice[row * K + bit] = static_cast<uint16_t>(mask);
    }
    for (int i = 0; i < kLanes; ++i) {
      int32_t cost = best[i] - shift;
      if (kTagged) cost = (cost & keep) | (row >> (kTagged ? 12 - 2 * K : 0));
      t.after[row * kLanes + i] = cost;
      low = cost < low ? cost : low;
    }
  }
  t.low = low;
}

}  // namespace

void encode_step(EncodeStep& s) {
  using Fn = void (*)(const int16_t*, EncodeStep::Tile&);
  static constexpr Fn kByBits[] = {step<4>, step<5>, step<6>, step<7>, step<8>};
  for (int i = 0; i < s.count; ++i) kByBits[s.bits - 4](s.table, s.tile[i]);
}

}  // namespace exl3::generic
