// Graph recording and the runtime switches of the CPU library.
#include <torch/csrc/stable/library.h>

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

void graph_begin() {
  EXL3_CHECK("graph_begin", !t_recording, "this thread is recording already");
  t_recording = std::make_shared<RecordedGraph>();
}

int64_t graph_end(bool keep) {
  EXL3_CHECK("graph_end", t_recording, "this thread is not recording");
  std::shared_ptr<RecordedGraph> graph = std::move(t_recording);
  t_recording.reset();
  if (!keep) return 0;
  std::lock_guard<std::mutex> lock(g_mutex);
  g_graphs[g_next] = std::move(graph);
  return g_next++;
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

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("graph_begin", TORCH_BOX(&graph_begin));
  m.impl("graph_end", TORCH_BOX(&graph_end));
  m.impl("graph_replay", TORCH_BOX(&graph_replay));
  m.impl("graph_size", TORCH_BOX(&graph_size));
  m.impl("graph_free", TORCH_BOX(&graph_free));
  m.impl("configure_cpu", TORCH_BOX(&configure_cpu));
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("cpu_threads", TORCH_BOX(&cpu_threads));
}

}  // namespace exl3::bind
