// How a CPU binding starts a launcher: run it, and note it when this thread records a graph.
#pragma once
#include <initializer_list>
#include <memory>
#include <vector>

#include "bind/check.h"
#include "cpu/graph.h"

namespace exl3::bind {

struct RecordedGraph {
  LaunchGraph launches;
  std::vector<Tensor> kept;  // every tensor a launch reads or writes lives as long as the graph
};

RecordedGraph* recording();  // of this thread, or null

template <class P>
void launch(const char* op, Status (*fn)(const P&), const P& params,
            std::initializer_list<Tensor> tensors, const std::vector<Tensor>& more = {}) {
  if (RecordedGraph* graph = recording()) {
    graph->launches.push(fn, params);
    graph->kept.insert(graph->kept.end(), tensors.begin(), tensors.end());
    graph->kept.insert(graph->kept.end(), more.begin(), more.end());
  }
  const Status status = fn(params);
  EXL3_CHECK(op, status == Status::kOk, status_text(status));
}

}  // namespace exl3::bind
