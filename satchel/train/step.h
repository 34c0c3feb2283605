// One training step, and what it costs in memory. Private to this room and tools.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "satchel/core/saved.h"
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
};

/// Forward, loss, backward, optimizer, from the seed. Returns the loss where it was computed: reading it waits for the step. Where
/// `cost` is given, memory is watched; the numbers that come out are the same.
at::Tensor train_step(const StepParts& parts, ParameterStep& optimizer, at::Device device, uint64_t seed, StepCost* cost = nullptr);

}  // namespace satchel
