#include "cpu/linear_plan.h"

#include "exl3/gemm_large.h"

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
    if (w.choice.kernel == LinearKernel::kLarge) {
      plan.large = true;
    } else {
      int64_t q = p.m * p.k;
      if (w.choice.kernel == LinearKernel::kTiles) {
        q = (p.m + 15) / 16 * 16 * p.k * (w.choice.q_max > 127 ? 4 : 2);
      }
      w.q = layout.take<int16_t>(q);
      w.meta = layout.take<LinearBlockMeta>(p.m * (p.k / kHadamardDim));
    }
    w.inner = layout.take<float>(p.m * p.w[i].n);
    plan.groups += p.w[i].n / kHadamardDim;
  }
  if (p.activation >= 0) plan.groups = p.w[0].n / kHadamardDim;
  if (plan.large) {
    plan.inputs = layout.take<float>(p.m * p.k);
    plan.gemm = layout.take<unsigned char>(gemm_large_workspace(p.m, p.k));
  }
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
