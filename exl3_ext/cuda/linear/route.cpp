// The table of measured routes, by device and problem.
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "exl3/linear_route.h"

namespace exl3 {
namespace {

struct Range {
  int64_t last;
  LinearRoute route;
};

std::shared_mutex g_mutex;
std::map<std::pair<int, LinearProblem>, std::map<int64_t, Range>> g_routes;  // by first row

}  // namespace

void set_linear_route(int device, const LinearProblem& problem, int64_t first_rows,
                      int64_t last_rows, LinearRoute route) {
  std::unique_lock lock(g_mutex);
  g_routes[{device, problem}][first_rows] = {last_rows, route};
}

void clear_linear_routes() {
  std::unique_lock lock(g_mutex);
  g_routes.clear();
}

LinearRoute linear_route(int device, const LinearGroup& group) {
  std::shared_lock lock(g_mutex);
  if (g_routes.empty()) return {};
  LinearProblem problem{
      group.k, group.w[0].bits, static_cast<int>(group.w[0].codebook), group.activation >= 0, {}};
  for (int i = 0; i < group.count; ++i) {
    if (group.w[i].bits != problem.bits || group.w[i].codebook != group.w[0].codebook) return {};
    problem.n.push_back(group.w[i].n);
  }
  const auto found = g_routes.find({device, problem});
  if (found == g_routes.end()) return {};
  auto range = found->second.upper_bound(group.m);
  if (range == found->second.begin()) return {};
  --range;
  return group.m <= range->second.last ? range->second.route : LinearRoute{};
}

}  // namespace exl3
