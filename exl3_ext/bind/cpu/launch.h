// How a CPU binding starts a launcher: run it, and note it when this thread records a graph.
#pragma once
#include <initializer_list>
#include <memory>
#include <optional>
#include <vector>

#include "bind/check.h"
#include "cpu/graph.h"
#include "cpu/memory_plan.h"

namespace exl3::bind {

struct RecordedGraph {
  LaunchGraph launches;
  std::vector<Tensor> kept;  // every tensor a launch reads or writes lives as long as the graph
  // Temporary tensors in the order of their allocation, see `allocate`.
  std::vector<PlannedTensor> planned;
  std::vector<Tensor> own;      // a first pass: each by itself
  std::optional<Tensor> arena;  // a second pass: all in one
  size_t next = 0;              // the second pass has allocated so many

  void keep(const Tensor& tensor);
};

RecordedGraph* recording();  // of this thread, or null

// float32, contiguous, not initialised: a result or a workspace of an op. While a graph is recorded
// with an arena, a part of that.
Tensor allocate(const Tensor& like, const std::vector<int64_t>& sizes);

template <class P>
void launch(const char* op, Status (*fn)(const P&), const P& params,
            std::initializer_list<Tensor> tensors, const std::vector<Tensor>& more = {}) {
  if (RecordedGraph* graph = recording()) {
    graph->launches.push(fn, params);
    for (const Tensor& tensor : tensors) graph->keep(tensor);
    for (const Tensor& tensor : more) graph->keep(tensor);
  }
  const Status status = fn(params);
  EXL3_CHECK(op, status == Status::kOk, status_text(status));
}

}  // namespace exl3::bind
