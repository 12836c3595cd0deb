// Tail-biting trellis search: the walk of a tile around its circle.
//
// A tile starts at position 0 with every node at cost 0 and goes round. After a lap and a bit the
// best path is traced back; if it is in the same node at steps p and p + 256, the lap between
// them is a closed path, and the best one through that node. If not, the walk goes on. A tile
// that never closes (its best path repeats only after two laps) gets one more lap, forced to start
// and end in a node of the path. This needs 1.2 to 2 laps where a free lap followed by a forced one
// needs 2, and finds better paths, because most nodes are chosen with more context.
//
// Each thread keeps kEncodeBatch tiles in flight and advances them together, so that each row of
// the table (256 KiB, from the second-level cache) serves all of them; when one closes the next
// tile takes its place. Memory per tile in flight: 512 steps of choices or costs; up to 3 bits the
// costs of every second or fourth.
#include "exl3/encode.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "cpu/encode_step.h"
#include "cpu/table.h"
#include "cpu/threads.h"
#include "exl3/codebook.h"

namespace exl3 {
namespace {

constexpr int kRing = kEncodeRing;
constexpr int kStagger = 320;  // keeps the rows of different tiles in different cache sets

// Steps from one kept row of coarse costs to the next: more is less memory and longer traces.
int stride_of(int bits) { return bits == 1 ? 4 : bits <= kEncodeCoarseBits ? 2 : 1; }

int64_t slot_bytes(int bits) {
  const int64_t nodes = kStates >> bits;
  int64_t bytes = nodes * 4 * kRing;
  if (bits == kEncodeTaggedBits) bytes = nodes * (2 * 4 + kRing * bits / 8);
  if (bits <= kEncodeCoarseBits) bytes = nodes * 2 * (2 + kRing / stride_of(bits));
  return (bytes + 4095) / 4096 * 4096 + kStagger;
}

// One tile on its way.
class Walk {
 public:
  void place(const EncodeParams& p, unsigned char* memory) {
    p_ = &p;
    nodes_ = kStates >> p.bits;
    stride_ = stride_of(p.bits);
    tagged_ = p.bits == kEncodeTaggedBits;
    coarse_ = p.bits <= kEncodeCoarseBits;
    coarse_costs_ = reinterpret_cast<int16_t*>(memory);
    costs_ = reinterpret_cast<int32_t*>(memory);
    choices_ = reinterpret_cast<uint16_t*>(costs_ + (tagged_ ? 2 * nodes_ : 0));
  }

  void begin(int64_t tile) {
    tile_ = tile;
    const float* w = p_->tiles + tile * kTileNumel;
    for (int i = 0; i < kTileNumel; ++i) {
      const float inside = std::fmin(std::fmax(w[i], -p_->weight_limit), p_->weight_limit);
      const float scaled = inside * p_->weight_scale;
      const int y = static_cast<int>(std::lrint(scaled));
      weight_[i] = static_cast<int16_t>(
          coarse_ ? encode_coarse_weight(p_->bits, static_cast<int>(std::floor(scaled)), y) : y);
    }
    start(0, -1);
    goal_ = kTileNumel + kEncodePatience[p_->bits].first;
  }

  void fill(EncodeStep::Tile& t) {
    t.before = row(step_);
    t.after = row(step_ + 1);
    t.choice = choices(step_);
    t.low = low_;
    const int16_t y = weight(step_);
    t.y[0] = tagged_ ? static_cast<int16_t>(p_->gain * kEncodeUnit) : y;
    t.y[1] = tagged_ ? static_cast<int16_t>(y * kEncodeUnit) : int16_t{0};
  }

  void fill(EncodeCoarseStep::Tile& t) {
    t.before = coarse_row(step_);
    t.after = coarse_row(step_ + 1);
    t.y = weight(step_);
    t.wide = encode_wide(p_->bits, t.y);
    t.reference = 0;
    if (step_ == 0) return;
    t.reference = t.before[0];
    for (int i = 1; i < kEncodeReferences; ++i)
      t.reference = std::min(t.reference, t.before[i << p_->bits]);
  }

  // Takes the result of a step; true when the tile is encoded.
  bool advance(int32_t low) {
    low_ = low;
    if (++step_ < goal_) return false;
    if (forced_ >= 0) {
      trace(forced_);
      write(0);
      return true;
    }
    trace(best_node());
    const int p = closed_at();
    if (p >= 0) {
      write(p);
      return true;
    }
    if (step_ < kEncodePatience[p_->bits].most) {
      goal_ += kEncodePatience[p_->bits].more;
      return false;
    }
    const int from = step_ - 3 * kTileNumel / 4;
    start((origin_ + from) & (kTileNumel - 1), path_[from & (kRing - 1)]);
    goal_ = kTileNumel;
    return false;
  }

 private:
  int16_t weight(int step) const { return weight_[(origin_ + step) & (kTileNumel - 1)]; }

  int32_t* row(int step) { return costs_ + int64_t{step & (tagged_ ? 1 : kRing - 1)} * nodes_; }

  // Every stride-th row stays in the ring; two are for those between.
  int16_t* coarse_row(int step) {
    const int kept = kRing / stride_;
    const int at = step % stride_ ? kept + (step & 1) : step / stride_ & (kept - 1);
    return coarse_costs_ + int64_t{at} * nodes_;
  }

  uint16_t* choices(int step) {
    return choices_ + int64_t{step & (kRing - 1)} * (nodes_ / 16 * p_->bits);
  }

  // Starts at position `origin` in `node`, or anywhere if it is -1.
  void start(int origin, int node) {
    origin_ = origin;
    forced_ = node;
    step_ = traced_ = 0;
    low_ = 0;
    if (coarse_) {
      std::fill_n(coarse_row(0), nodes_, static_cast<int16_t>(node < 0 ? 0 : kEncodeCoarseFar));
      if (node >= 0) coarse_row(0)[node] = 0;
      return;
    }
    for (int i = 0; i < nodes_; ++i) {
      const int tag = tagged_ ? i >> (16 - 2 * p_->bits) : 0;
      costs_[i] = (node < 0 || i == node ? 0 : kEncodeCap & -256) | tag;
    }
  }

  int best_node() {
    if (coarse_) {
      const int16_t* costs = coarse_row(step_);
      return static_cast<int>(std::min_element(costs, costs + nodes_) - costs);
    }
    const int32_t* costs = row(step_);
    return static_cast<int>(std::find(costs, costs + nodes_, low_) - costs);
  }

  // Finds the h of the stride steps before `at` on the best path to `node` there: all ways from the
  // row of costs at their beginning, step by step what the search did.
  void find_ways(int at, int node) {
    const int bits = p_->bits, fan = 1 << bits;
    const int16_t* row = coarse_row(at - stride_);
    int ways[4], nodes[256], costs[256], choices[4][64];  // by depth, the last h lowest
    ways[0] = 1;
    for (int d = 1; d < stride_; ++d) ways[d] = ways[d - 1] << bits;
    const auto reached = [&](int way, int depth) {
      int result = node;
      for (int d = depth - 1; d >= 0; --d)
        result = (way >> d * bits & (fan - 1)) << (16 - 2 * bits) | result >> bits;
      return result;
    };
    for (int way = 0; way < ways[stride_ - 1] << bits; ++way)
      costs[way] = row[reached(way, stride_)];
    for (int d = stride_ - 1; d >= 0; --d) {
      const int y = weight(at - 1 - d);
      const bool wide = encode_wide(bits, y);
      for (int way = 0; way < ways[d]; ++way) nodes[way] = reached(way, d);
      for (int way = 0; way < ways[d]; ++way) {
        int best = INT32_MAX;
        for (int h = 0; h < fan; ++h) {
          const int number = p_->table[encode_coarse_place(bits, h, nodes[way])];
          const int cost = costs[way << bits | h] + encode_coarse_edge(number, y, wide);
          best = std::min(best, cost << 3 | h);
        }
        costs[way] = best >> 3;
        choices[d][way] = best & 7;
      }
    }
    for (int d = 0, way = 0; d < stride_; ++d) {
      ways_[d] = choices[d][way];
      way = way << bits | ways_[d];
    }
  }

  // The state of `step` on the best path to `node` after it.
  int chosen(int step, int node) {
    const int bits = p_->bits, fan = 1 << bits;
    int h = 0;
    if (coarse_) {
      const int back = stride_ - 1 - step % stride_;
      if (back == 0) find_ways(step + 1, node);
      h = ways_[back];
    } else if (tagged_) {
      const uint16_t* choice = choices(step) + (node >> 4) * bits;
      for (int i = 0; i < bits; ++i) h |= (choice[i] >> (node & 15) & 1) << i;
    } else {
      const int32_t* old = row(step) + (node >> bits);
      const int16_t* x = p_->table + (int64_t{node >> 4} * fan * 16 + (node & 15)) * 2;
      const int y = weight(step);
      int32_t best = INT32_MAX;
      for (int i = 0; i < fan; ++i) {
        const int d = x[i * 32] - y;
        const int32_t cost = old[i << (16 - 2 * bits)] + d * d;
        if (cost < best) {
          best = cost;
          h = i;
        }
      }
    }
    return h << (16 - bits) | node;
  }

  int oldest() const { return std::max(0, step_ - encode_reach(p_->bits)); }

  // path_[t] becomes the node before step t of the best path to `node`; stops where that path
  // meets the one traced before.
  void trace(int node) {
    path_[step_ & (kRing - 1)] = static_cast<uint16_t>(node);
    for (int t = step_ - 1; t >= oldest(); --t) {
      node = chosen(t, node) >> p_->bits;
      uint16_t& at = path_[t & (kRing - 1)];
      if (t < traced_ && at == node) break;
      at = static_cast<uint16_t>(node);
    }
    traced_ = step_;
  }

  // The step p nearest to the middle with the same node at p and p + 256, or -1.
  int closed_at() const {
    const int first = oldest(), last = step_ - kTileNumel, middle = (first + last) / 2;
    for (int k = 0; k <= last - middle; ++k) {
      if (same(middle + k)) return middle + k;
      if (middle - k >= first && same(middle - k)) return middle - k;
    }
    return -1;
  }
  bool same(int p) const { return path_[p & (kRing - 1)] == path_[(p + kTileNumel) & (kRing - 1)]; }

  // Packs the lap that starts at step p. The states follow from the packed bits alone.
  void write(int p) {
    const int bits = p_->bits, mask = (1 << bits) - 1;
    uint8_t fresh[kTileNumel];
    for (int i = 0; i < kTileNumel; ++i)
      fresh[(origin_ + p + i) & (kTileNumel - 1)] =
          static_cast<uint8_t>(path_[(p + i + 1) & (kRing - 1)] & mask);
    uint16_t* words = p_->trellis + tile_ * 16 * bits;
    float* values = p_->values + tile_ * kTileNumel;
    uint32_t state = 0;
    for (int i = kTileNumel - 16; i < kTileNumel; ++i) state = state << bits | fresh[i];
    uint64_t stream = 0;
    int held = 0, word = 0;
    for (int i = 0; i < kTileNumel; ++i) {
      state = (state << bits | fresh[i]) & (kStates - 1);
      values[i] = p_->codebook[state];
      stream = stream << bits | fresh[i];
      held += bits;
      if (held < 16) continue;
      held -= 16;
      words[stored_word(word++)] = static_cast<uint16_t>(stream >> held);
    }
  }

  const EncodeParams* p_ = nullptr;
  int nodes_ = 0;
  int stride_ = 1;
  bool tagged_ = false, coarse_ = false;
  int16_t* coarse_costs_ = nullptr;
  int ways_[4] = {};             // the last find_ways
  int32_t* costs_ = nullptr;     // two rows, or kRing rows
  uint16_t* choices_ = nullptr;  // kRing rows
  int64_t tile_ = 0;
  int origin_ = 0, forced_ = -1, step_ = 0, goal_ = 0, traced_ = 0;
  int32_t low_ = 0;
  int16_t weight_[kTileNumel];
  uint16_t path_[kRing];
};

void run(EncodeStep& s) { kernels().encode_step(s); }
void run(EncodeCoarseStep& s) { kernels().encode_coarse_step(s); }
int32_t low(const EncodeStep::Tile& t) { return t.low; }
int32_t low(const EncodeCoarseStep::Tile&) { return 0; }

// Encodes tiles until the counter runs out.
template <class Step>
void work(const EncodeParams& p, std::atomic<int64_t>& next, unsigned char* memory) {
  Walk walks[kEncodeBatch];
  int live[kEncodeBatch];
  Step s{};
  s.table = p.table;
  s.bits = p.bits;
  for (int i = 0; i < kEncodeBatch; ++i) {
    const int64_t tile = next.fetch_add(1, std::memory_order_relaxed);
    if (tile >= p.n_tiles) break;
    walks[i].place(p, memory + i * slot_bytes(p.bits));
    walks[i].begin(tile);
    live[s.count++] = i;
  }
  while (s.count > 0) {
    for (int i = 0; i < s.count; ++i) walks[live[i]].fill(s.tile[i]);
    run(s);
    int kept = 0;
    for (int i = 0; i < s.count; ++i) {
      Walk& walk = walks[live[i]];
      if (walk.advance(low(s.tile[i]))) {
        const int64_t tile = next.fetch_add(1, std::memory_order_relaxed);
        if (tile >= p.n_tiles) continue;
        walk.begin(tile);
      }
      live[kept++] = live[i];
    }
    s.count = kept;
  }
}

}  // namespace

int64_t encode_workspace_bytes(int bits) { return kEncodeBatch * slot_bytes(bits); }

Status encode_cpu(const EncodeParams& p) {
  if (p.bits < 1 || p.bits > 8 || num_threads() > p.threads) return Status::kBadArgument;
  std::atomic<int64_t> next{0};
  const int64_t stride = encode_workspace_bytes(p.bits);
  const auto run_work = p.bits <= kEncodeCoarseBits ? work<EncodeCoarseStep> : work<EncodeStep>;
  parallel_for(std::min<int64_t>(p.n_tiles, p.threads), 1, [&](int64_t, int64_t, int thread) {
    run_work(p, next, p.workspace + thread * stride);
  });
  return Status::kOk;
}

}  // namespace exl3
