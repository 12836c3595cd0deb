// Splits attention into tasks: blocks of rows of one kv head, and spans of keys where there are few
// rows and many keys. No split changes a result: see attention.h.
#include "cpu/attention.h"

#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "cpu/scratch.h"
#include "cpu/table.h"
#include "cpu/threads.h"

namespace exl3 {
namespace {

constexpr int64_t kMostSpans = 32;
constexpr int64_t kSerialWork =
    1 << 19;  // multiply-adds under which a fork costs more than it saves

struct Plan {
  std::vector<AttentionTask> tasks;
  std::vector<AttentionMerge> merges;
  int64_t partial_floats = 0;
  int64_t work = 0;  // multiply-adds, about
};

thread_local Plan t_plan;

bool pages_in_range(const AttentionParams& p, int64_t b, KeyRange keys) {
  for (int64_t i = keys.begin / kPageSize; i * kPageSize < keys.end; ++i) {
    const int64_t page = p.page_table[b * p.max_pages + i];
    if (page < 0 || page >= p.pages) return false;
  }
  return true;
}

// Keys that the rows of queries [first, last] see between them.
KeyRange visible_union(const AttentionParams& p, int64_t b, int64_t first, int64_t last) {
  const int64_t hidden = p.query_starts[b + 1] - p.query_starts[b] - p.seq_lens[b];
  if (first < hidden) first = hidden < last ? hidden : last;  // queries before position 0 see none
  return {visible_keys(p, b, first).begin, visible_keys(p, b, last).end};
}

// Keys of a task, whole chunks.
int64_t span_keys(int64_t rows, int64_t blocks, int64_t keys) {
  const int64_t least = rows <= 16 ? 256 : 1024;
  const int64_t even = blocks >= 16 ? keys : (keys + kMostSpans - 1) / kMostSpans;
  const int64_t span = even > least ? even : least;
  return (span + kAttentionChunk - 1) / kAttentionChunk * kAttentionChunk;
}

void plan_block(const AttentionParams& p, Plan& plan, AttentionTask whole, int64_t span) {
  const int64_t rows = whole.row_end - whole.row_begin;
  const int64_t keys = whole.key_end - whole.key_begin;
  plan.work += rows * keys * (p.head_dim + p.v_head_dim);
  if (keys <= span) {
    whole.partial = -1;
    plan.tasks.push_back(whole);
    return;
  }
  AttentionMerge merge{whole.row_begin, whole.row_end, plan.partial_floats,
                       whole.sequence,  whole.kv_head, 0};
  AttentionTask part = whole;
  for (int64_t at = whole.key_begin; at < whole.key_end; at = part.key_end) {
    const int64_t end = (at / span + 1) * span;
    part.key_begin = at;
    part.key_end = end < whole.key_end ? end : whole.key_end;
    part.partial = plan.partial_floats;
    const int64_t chunks = (part.key_end - 1) / kAttentionChunk - at / kAttentionChunk + 1;
    plan.partial_floats += chunks * rows * partial_stride(p);
    plan.tasks.push_back(part);
    merge.chunks += static_cast<int>(chunks);
  }
  plan.merges.push_back(merge);
}

Status plan_sequence(const AttentionParams& p, Plan& plan, int64_t b) {
  const int64_t queries = p.query_starts[b + 1] - p.query_starts[b];
  if (queries < 0 || p.query_starts[b] < 0 || p.query_starts[b + 1] > p.rows || p.seq_lens[b] < 0 ||
      p.seq_lens[b] > p.max_pages * kPageSize) {
    return Status::kOutOfRange;
  }
  if (queries == 0) return Status::kOk;
  if (!pages_in_range(p, b, visible_union(p, b, 0, queries - 1))) return Status::kOutOfRange;
  const int group = group_size(p);
  const int64_t rows = queries * group;
  const int64_t blocks = (rows + kAttentionRows - 1) / kAttentionRows;
  // The last rows see the most keys: they come first, so that the threads end together.
  for (int64_t block = blocks - 1; block >= 0; --block) {
    AttentionTask t{};
    t.sequence = static_cast<int>(b);
    t.row_begin = block * kAttentionRows;
    t.row_end = t.row_begin + kAttentionRows < rows ? t.row_begin + kAttentionRows : rows;
    const KeyRange keys = visible_union(p, b, t.row_begin / group, (t.row_end - 1) / group);
    t.key_begin = keys.begin;
    t.key_end = keys.end;
    const int64_t span = span_keys(t.row_end - t.row_begin, blocks, keys.end - keys.begin);
    for (t.kv_head = 0; t.kv_head < p.kv_heads; ++t.kv_head) plan_block(p, plan, t, span);
  }
  return Status::kOk;
}

Status make_plan(const AttentionParams& p, Plan& plan) {
  plan.tasks.clear();
  plan.merges.clear();
  plan.partial_floats = plan.work = 0;
  for (int64_t b = 0; b < p.sequences; ++b) {
    if (b > 0 && p.query_starts[b] < p.query_starts[b - 1]) return Status::kOutOfRange;
    const Status status = plan_sequence(p, plan, b);
    if (status != Status::kOk) return status;
  }
  return Status::kOk;
}

void zero_rows(const AttentionParams& p, int64_t begin, int64_t end) {
  const int64_t width = static_cast<int64_t>(p.q_heads) * p.v_head_dim;
  if (end > begin) std::memset(p.out + begin * width, 0, (end - begin) * width * sizeof(float));
}

Status run_plan(const AttentionParams& p, const Plan& plan) {
  float* partial = nullptr;
  if (plan.partial_floats > 0) {
    const size_t bytes = plan.partial_floats * sizeof(float);
    partial = static_cast<float*>(scratch(Scratch::kPartial, bytes));
    if (!partial) return Status::kOutOfMemory;
  }
  const KernelTable& k = kernels();
  const size_t bytes = attention_scratch(p) * sizeof(float);
  const int64_t tasks = static_cast<int64_t>(plan.tasks.size());
  const int64_t grain = plan.work < kSerialWork ? tasks : 1;
  std::atomic<bool> failed{false};
  parallel_tasks(tasks, grain, [&](int64_t task, int) {
    float* work = static_cast<float*>(scratch(Scratch::kTask, bytes));
    if (work)
      k.attention_task(p, plan.tasks[task], partial, work);
    else
      failed.store(true, std::memory_order_relaxed);
  });
  if (failed.load()) return Status::kOutOfMemory;
  const int64_t merges = static_cast<int64_t>(plan.merges.size());
  parallel_tasks(merges, plan.partial_floats < kSerialWork ? merges : 1,
                 [&](int64_t i, int) { k.attention_merge(p, plan.merges[i], partial); });
  return Status::kOk;
}

}  // namespace

Status attention_cpu(const AttentionParams& p) {
  if (p.kv_heads < 1 || p.q_heads % p.kv_heads != 0 || p.head_dim < 1 || p.v_head_dim < 1) {
    return Status::kBadArgument;
  }
  Plan& plan = t_plan;
  try {
    const Status status = make_plan(p, plan);
    if (status != Status::kOk) return status;
  } catch (const std::bad_alloc&) {
    return Status::kOutOfMemory;
  }
  zero_rows(p, 0, p.query_starts[0]);
  zero_rows(p, p.query_starts[p.sequences], p.rows);
  return run_plan(p, plan);
}

}  // namespace exl3
