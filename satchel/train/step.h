// One training step, and what it costs in memory. Private to this room and tools.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "satchel/core/saved.h"
#include "satchel/train/captured.h"
#include "satchel/train/memory.h"
#include "satchel/train/optimizer.h"

namespace satchel {

/// As RunResult has it; `peak_bytes` without a cached A·X.
struct StepCost {
  int64_t saved_bytes = 0, loss_bytes = 0, peak_bytes = 0;
  std::vector<SavedTensor> tensors;  // of functions of this library, the loss's lines too
};

struct StepParts {
  std::function<at::Tensor()> forward;                       // logits
  std::function<at::Tensor(const at::Tensor& logits)> loss;  // may overwrite the logits
  std::function<int64_t()> more_logit_bytes = {};            // of what else forward gave the loss, where it did
};

/// Forward, loss, backward, optimizer: the step that a run repeats. On CUDA nothing in it waits for the GPU, and its seeds, as many as
/// the step before took, get there by one copy.
///
/// With `cuda_graph` the first kEager steps run as they are, and the next one is captured; it and all after it are replayed, from the
/// same seeds, so that the results are the same bit for bit. Parameters, buffers, optimizer state and what the parts read must keep
/// their place in memory; gradients live in the graph's own. Where `cuda_graph` says nothing, steps on CUDA are captured if they can be
/// and if twice the memory of a watched step is free (the graph keeps it once, and evaluations allocate beside it); else
/// eager_because() tells why they go on as they are.
class TrainStep {
 public:
  static constexpr int64_t kEager = 3;

  TrainStep(StepParts parts, ParameterStep& optimizer, at::Device device, std::optional<bool> cuda_graph = false);

  /// One step from the seed. Returns the loss (ParameterStep::marked) where it was computed, until the next step: reading it waits for the
  /// step. Where `cost` is given, memory is watched; the numbers that come out are the same. A captured step's memory cannot be.
  at::Tensor operator()(uint64_t seed, StepCost* cost = nullptr);

  /// Are steps to come from a CUDA graph, or do they already?
  bool has_graph() const { return graph_ != nullptr; }
  bool replays() const { return graph_ != nullptr && graph_->captured(); }
  /// Why steps that might have come from a CUDA graph do not; empty: nobody asked, or they do.
  const std::string& eager_because() const { return eager_because_; }

 private:
  at::Tensor eager(StepCost* cost);
  at::Tensor forward_to_optimizer(MemoryMeter* meter, StepCost* cost);
  void capture();
  /// False where steps go on as they are.
  bool capture_or_fall_back();

  StepParts parts_;
  ParameterStep& optimizer_;
  at::Device device_;
  bool may_fall_back_;
  std::string eager_because_;
  int64_t steps_ = 0, seeds_ = 0;  // seeds: of the step before
  int64_t peak_bytes_ = 0;         // of the watched steps
  at::Tensor bank_, loss_;         // what the graph reads its seeds from, and writes
  std::unique_ptr<CapturedWork> graph_;
};

}  // namespace satchel
