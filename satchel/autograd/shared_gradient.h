// The gradient of a residual block's input, which two of the block's functions make: the first layer, and the sum or the layer on its other
// side. Whoever runs first leaves its own here and hands on nothing; the second adds its own in place and hands on the sum. So one tensor
// of the input's size stands where torch has two, and no pass adds them up. Private to the rooms that define functions.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace satchel {

/// A backward pass that reaches one of the two reaches the other: both have an edge to the same node, and a block's own module makes both.
/// Hooks of their nodes see what they hand on: nothing, and the sum. What a pass that fails has left goes with the graph.
class SharedGradient {
 public:
  /// A function has recorded a node that leaves and takes here. Unless both have, each hands on its own.
  void join() { ++joined_; }
  bool is_shared() const { return joined_ == 2; }

  /// What the other function has left in this backward pass, to be written over; undefined: it had no gradient; none: this one is the
  /// first.
  std::optional<at::Tensor> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = left_.extract(torch::autograd::get_current_graph_task_id());
    if (!found) return std::nullopt;
    return std::move(found.mapped());
  }
  void leave(at::Tensor g) {
    const std::lock_guard<std::mutex> lock(mutex_);
    left_[torch::autograd::get_current_graph_task_id()] = std::move(g);
  }

 private:
  int joined_ = 0;
  std::mutex mutex_;
  std::unordered_map<int, at::Tensor> left_;  // by backward pass: threads may share a graph, and a pass may fail half-way
};

}  // namespace satchel
