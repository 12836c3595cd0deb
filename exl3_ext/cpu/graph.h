// Recording of launches, the CPU's counterpart of a captured CUDA graph: while a thread records,
// every launch is executed and also noted with its params struct; replay calls the launchers again
// in order, with no Python and no dispatcher between. Pointers are fixed, contents may change.
#pragma once
#include <cstddef>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "exl3/status.h"

namespace exl3 {

class LaunchGraph {
 public:
  template <class P>
  void push(Status (*fn)(const P&), const P& params) {
    static_assert(std::is_trivially_copyable_v<P>, "params structs hold plain data only");
    Node node;
    node.call = [](void (*f)(), const void* p) {
      return reinterpret_cast<Status (*)(const P&)>(f)(*static_cast<const P*>(p));
    };
    node.fn = reinterpret_cast<void (*)()>(fn);
    node.params = std::make_unique<unsigned char[]>(sizeof(P) + alignof(P));
    void* at = node.params.get();
    size_t space = sizeof(P) + alignof(P);
    std::align(alignof(P), sizeof(P), at, space);
    std::memcpy(at, &params, sizeof(P));
    node.at = at;
    nodes_.push_back(std::move(node));
  }

  Status replay() const {
    for (const Node& n : nodes_) {
      const Status s = n.call(n.fn, n.at);
      if (s != Status::kOk) return s;
    }
    return Status::kOk;
  }

  size_t size() const { return nodes_.size(); }

 private:
  struct Node {
    Status (*call)(void (*fn)(), const void* params) = nullptr;
    void (*fn)() = nullptr;
    std::unique_ptr<unsigned char[]> params;
    const void* at = nullptr;
  };
  std::vector<Node> nodes_;
};

}  // namespace exl3
