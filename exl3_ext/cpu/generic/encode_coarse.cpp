// One coarse step of the trellis search (cpu/encode_step.h), plain loops over the 32 lanes of a
// row.
#include "cpu/generic/encode.h"

namespace exl3::generic {
namespace {

constexpr int kLanes = kEncodeCoarseLanes;

// best[i] = min(best[i], old[i mod P] + edge). Halved differences fit 16 bits and lose nothing, and
// products of those are widening ones; bounded first, so that no square has more steps than may be.
template <int K, bool kWide>
[[gnu::noinline]] void relax(const int16_t* old, const int16_t* table, int16_t y, int16_t* best) {
  constexpr int kPeriod = kLanes >> K;
  constexpr int16_t kMost = kWide ? 5794 : 2897;  // the least that has kEncodeCoarseMost steps
  const int16_t half = static_cast<int16_t>(y >> 1);
  int16_t base[kPeriod], d[kLanes], edge[kLanes];
  for (int i = 0; i < kPeriod; ++i) base[i] = old[i];
  for (int i = 0; i < kLanes; ++i) d[i] = static_cast<int16_t>((table[i] >> 1) - half);
  for (int i = 0; i < kLanes; ++i) d[i] = d[i] < kMost ? d[i] : kMost;
  for (int i = 0; i < kLanes; ++i) d[i] = d[i] > -kMost ? d[i] : static_cast<int16_t>(-kMost);
  for (int i = 0; i < kLanes; ++i)
    edge[i] =
        static_cast<int16_t>((int32_t{d[i]} * d[i] + (kWide ? 16383 : 4095)) >> (kWide ? 15 : 13));
  for (int i = 0; i < kLanes; ++i) {
    const int16_t cost = static_cast<int16_t>(edge[i] * (kWide ? 4 : 1) + base[i % kPeriod]);
    best[i] = cost < best[i] ? cost : best[i];
  }
}

template <int K, bool kWide>
void step(const int16_t* table, EncodeCoarseStep::Tile& t) {
  constexpr int kNodes = kStates >> K, kFan = 1 << K, kOld = kNodes >> K, kPeriod = kLanes >> K;
  for (int row = 0; row < kNodes / kLanes; ++row) {
    int16_t best[kLanes];
    for (int i = 0; i < kLanes; ++i) best[i] = INT16_MAX;
    for (int h = 0; h < kFan; ++h, table += kLanes)
      relax<K, kWide>(t.before + h * kOld + row * kPeriod, table, t.y, best);
    for (int i = 0; i < kLanes; ++i)
      t.after[row * kLanes + i % kPeriod * kFan + i / kPeriod] =
          static_cast<int16_t>(best[i] - t.reference);
  }
}

}  // namespace

void encode_coarse_step(EncodeCoarseStep& s) {
  for (int i = 0; i < s.count; ++i) {
    EncodeCoarseStep::Tile& t = s.tile[i];
    if (s.bits == 1)
      step<1, false>(s.table, t);
    else if (s.bits == 2)
      step<2, false>(s.table, t);
    else if (t.wide)
      step<3, true>(s.table, t);
    else
      step<3, false>(s.table, t);
  }
}

}  // namespace exl3::generic
