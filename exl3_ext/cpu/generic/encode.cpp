// One step of the trellis search (cpu/encode_step.h), plain loops over the 16 lanes of a row.
#include "cpu/generic/encode.h"

namespace exl3::generic {
namespace {

template <int K>
void step(const int16_t* table, EncodeStep::Tile& t) {
  constexpr int kNodes = kStates >> K, kFan = 1 << K, kOld = kNodes >> K;
  constexpr bool kTagged = K <= kEncodeTaggedBits;
  constexpr int kPeriod = K < 4 ? 16 >> K : 1;  // predecessors of a row for one h
  const int32_t shift = t.low < kEncodeShift ? t.low : kEncodeShift;
  const int16_t y0 = t.y[0], y1 = t.y[1];
  int32_t low = kEncodeCap;
  for (int row = 0; row < kNodes / 16; ++row) {
    int32_t best[16];
    for (int i = 0; i < 16; ++i) best[i] = kEncodeCap + shift;
    const int first = K < 4 ? row * kPeriod : row >> (K < 4 ? 0 : K - 4);
    for (int h = 0; h < kFan; ++h) {
      const int32_t* old = t.before + h * kOld + first;
      for (int i = 0; i < 16; ++i) {
        const int16_t x0 = table[2 * i], x1 = table[2 * i + 1];
        const int16_t d = static_cast<int16_t>(x0 - y0);
        const int32_t edge = kTagged ? int32_t{x0} * y0 + int32_t{x1} * y1 : int32_t{d} * d;
        const int32_t cost = old[i % kPeriod] + edge;
        best[i] = cost < best[i] ? cost : best[i];
      }
      table += 32;
    }
    for (int i = 0; i < 16; ++i) {
      int32_t cost = best[i] - shift;
      if (kTagged) {
        t.choice[row * 16 + i] = static_cast<uint8_t>(best[i]);
        cost = (cost & -kFan) | (row >> (kTagged ? 12 - 2 * K : 0));
      }
      t.after[row * 16 + (i % kPeriod) * kFan % 16 + i / kPeriod] = cost;
      low = cost < low ? cost : low;
    }
  }
  t.low = low;
}

}  // namespace

void encode_step(EncodeStep& s) {
  using Fn = void (*)(const int16_t*, EncodeStep::Tile&);
  static constexpr Fn kByBits[] = {step<1>, step<2>, step<3>, step<4>,
                                   step<5>, step<6>, step<7>, step<8>};
  for (int i = 0; i < s.count; ++i) kByBits[s.bits - 1](s.table, s.tile[i]);
}

}  // namespace exl3::generic
