#include "cpu/linear_plan.h"

namespace exl3 {
namespace {

class Layout {
 public:
  explicit Layout(unsigned char* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    T* at = reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return at;
  }
  int64_t used() const { return used_; }

 private:
  unsigned char* base_;
  int64_t used_ = 0;
};

}  // namespace

LinearPlan linear_plan(const LinearParams& p, Isa isa) {
  LinearPlan plan{};
  Layout layout(p.workspace);
  for (int i = 0; i < p.count; ++i) {
    LinearWeightPlan& w = plan.w[i];
    w.choice = linear_select(isa, p.w[i].codebook, p.w[i].bits, p.m);
    const int64_t whole = (p.m + 15) / 16 * 16;  // rows of AMX tiles
    int64_t q = p.m * p.k;
    if (w.choice.kernel == LinearKernel::kTiles) q = whole * p.k * 2 * w.choice.planes;
    if (w.choice.kernel == LinearKernel::kMany) q = whole * p.k / 2 * w.choice.planes;
    w.q = layout.take<int16_t>(q);
    static_assert(sizeof(LinearTileMeta) <= 16 * sizeof(LinearBlockMeta));
    w.meta = layout.take<LinearBlockMeta>(whole * (p.k / kHadamardDim));
    w.inner = layout.take<float>(p.m * p.w[i].n);
    plan.groups += p.w[i].n / kHadamardDim;
  }
  if (p.activation >= 0) plan.groups = p.w[0].n / kHadamardDim;
  plan.counters = layout.take<int32_t>(1 + plan.groups);
  plan.bytes = layout.used();
  return plan;
}

int64_t linear_workspace_bytes(const LinearParams& p) {
  LinearParams part = p;
  if (part.m > kLinearRows) part.m = kLinearRows;
  int64_t most = 0;  // the level may change before a replay
  for (int isa = 0; isa < kIsaLevels; ++isa) {
    const int64_t bytes = linear_plan(part, static_cast<Isa>(isa)).bytes;
    if (bytes > most) most = bytes;
  }
  return most;
}

}  // namespace exl3
