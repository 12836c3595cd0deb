// Graph recording and the runtime switches of the CPU library.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <map>
#include <mutex>

#include "bind/cpu/launch.h"
#include "cpu/isa.h"
#include "cpu/threads.h"

namespace exl3::bind {
namespace {

thread_local std::shared_ptr<RecordedGraph> t_recording;
std::mutex g_mutex;
std::map<int64_t, std::shared_ptr<RecordedGraph>> g_graphs;
int64_t g_next = 1;

std::shared_ptr<RecordedGraph> find(const char* op, int64_t graph) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto it = g_graphs.find(graph);
  EXL3_CHECK(op, it != g_graphs.end(), "no graph ", graph);
  return it->second;
}

thread_local std::vector<PlannedTensor> t_plan;  // of the last graph_measure

void graph_begin(const std::optional<Tensor>& arena) {
  EXL3_CHECK("graph_begin", !t_recording, "this thread is recording already");
  t_recording = std::make_shared<RecordedGraph>();
  if (!arena) return;
  t_recording->arena = arena;
  t_recording->planned = std::move(t_plan);
  t_plan.clear();
}

std::shared_ptr<RecordedGraph> finished(const char* op) {
  EXL3_CHECK(op, t_recording, "this thread is not recording");
  std::shared_ptr<RecordedGraph> graph = std::move(t_recording);
  t_recording.reset();
  return graph;
}

int64_t graph_end(bool keep) {
  std::shared_ptr<RecordedGraph> graph = finished("graph_end");
  if (!keep) return 0;
  std::lock_guard<std::mutex> lock(g_mutex);
  g_graphs[g_next] = std::move(graph);
  return g_next++;
}

// Ends a first pass. The results are needed to the end. Returns the bytes of an arena with which
// the same can be recorded next.
int64_t graph_measure(std::vector<Tensor> results) {
  const std::shared_ptr<RecordedGraph> graph = finished("graph_measure");
  for (const Tensor& result : results) graph->keep(result);
  t_plan = std::move(graph->planned);
  return plan_memory(t_plan);
}

void graph_replay(int64_t graph) {
  const Status status = find("graph_replay", graph)->launches.replay();
  EXL3_CHECK("graph_replay", status == Status::kOk, status_text(status));
}

int64_t graph_size(int64_t graph) {
  return static_cast<int64_t>(find("graph_size", graph)->launches.size());
}

void graph_free(int64_t graph) {
  std::shared_ptr<RecordedGraph> freed;  // tensors are released outside the lock
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto it = g_graphs.find(graph);
  if (it == g_graphs.end()) return;
  freed = std::move(it->second);
  g_graphs.erase(it);
}

void configure_cpu(int64_t threads, int64_t isa_cap) {
  EXL3_CHECK("configure_cpu", isa_cap >= 0 && isa_cap < kIsaLevels, "isa_cap is ", isa_cap);
  set_num_threads(static_cast<int>(threads));
  set_isa_cap(static_cast<Isa>(isa_cap));
}

int64_t cpu_isa(bool detected) {
  return static_cast<int64_t>(detected ? detect_isa() : active_isa());
}
int64_t cpu_threads() { return num_threads(); }

}  // namespace

RecordedGraph* recording() { return t_recording.get(); }

// Views share the memory of what they show.
void RecordedGraph::keep(const Tensor& tensor) {
  kept.push_back(tensor);
  const auto* at = static_cast<const unsigned char*>(tensor.const_data_ptr());
  for (size_t i = 0; i < own.size(); ++i) {
    const auto* base = static_cast<const unsigned char*>(own[i].const_data_ptr());
    if (base <= at && at < base + planned[i].bytes) {
      planned[i].last = static_cast<int64_t>(launches.size());
    }
  }
}

Tensor allocate(const Tensor& like, const std::vector<int64_t>& sizes) {
  int64_t bytes = sizeof(float);
  for (const int64_t size : sizes) bytes *= size;
  RecordedGraph* graph = recording();
  if (graph && graph->arena) {
    EXL3_CHECK("allocate",
               graph->next < graph->planned.size() && graph->planned[graph->next].bytes == bytes,
               "what is recorded differs from what was measured");
    Tensor all = *graph->arena;
    const int64_t offset = graph->planned[graph->next++].offset / sizeof(float);
    return torch::stable::view(
        torch::stable::narrow(all, 0, offset, bytes / static_cast<int64_t>(sizeof(float))), sizes);
  }
  const Tensor tensor = torch::stable::new_empty(like, sizes, ScalarType::Float);
  if (graph) {
    const auto now = static_cast<int64_t>(graph->launches.size()) + 1;  // the launch to come
    graph->planned.push_back({bytes, now, now, 0});
    graph->own.push_back(tensor);
  }
  return tensor;
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("graph_begin", TORCH_BOX(&graph_begin));
  m.impl("graph_measure", TORCH_BOX(&graph_measure));
  m.impl("graph_end", TORCH_BOX(&graph_end));
  m.impl("graph_replay", TORCH_BOX(&graph_replay));
  m.impl("graph_size", TORCH_BOX(&graph_size));
  m.impl("graph_free", TORCH_BOX(&graph_free));
  m.impl("configure_cpu", TORCH_BOX(&configure_cpu));
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("cpu_threads", TORCH_BOX(&cpu_threads));
}

}  // namespace exl3::bind
