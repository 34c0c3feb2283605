// The gradient of a residual block's input, which two of the block's functions make: the first layer, and the sum or the layer on its other
// side. Whoever runs first leaves its own here and hands on nothing; the second adds its own in place and hands on the sum. So one tensor
// of the input's size stands where torch has two, and no pass adds them up. Private to the rooms that define functions.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace satchel {

/// Both functions read one tensor, and a backward pass that reaches one of them reaches the other: a block's own module sees to that.
class SharedGradient {
 public:
  /// A function has recorded a node that leaves and takes here. Unless both have, each hands on its own.
  void join() { ++joined_; }
  bool is_shared() const { return joined_ == 2; }

  /// What the other function has left in this backward pass, to be written over; undefined: this one is the first.
  at::Tensor take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = left_.find(torch::autograd::get_current_graph_task_id());
    if (found == left_.end()) return {};
    at::Tensor g = std::move(found->second);
    left_.erase(found);
    return g;
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
