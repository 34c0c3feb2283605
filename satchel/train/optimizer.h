// Adam, AdamW and SGD over all parameters in one fused step, with a state that checkpoints hold. Private to this room and tools.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "satchel/train/train.h"

namespace satchel {

/// torch's own fused kernels: the same formulas and constants (β .9 and .999, ε 1e-8) as torch.optim's.
class ParameterStep {
 public:
  ParameterStep(const TrainOptions& options, std::vector<at::Tensor> parameters);

  /// Returns the bytes that it lets go.
  int64_t clear_gradients();
  /// Clips where the options say so, and moves the parameters that have a gradient.
  void step();

  /// What the next step reads: "step", "0.exp_avg", "0.exp_avg_sq", "0.momentum" …
  std::map<std::string, at::Tensor> state() const;
  /// Throws unless names and shapes are those of state().
  void restore(const std::map<std::string, at::Tensor>& state);

 private:
  void clip(std::vector<at::Tensor>& gradients) const;

  TrainOptions options_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> mean_, square_;  // Adam; SGD: mean_ is the momentum
  at::Tensor steps_;                       // float32, on the parameters' device
};

/// Throws `[resume] …` unless `state` has the names, shapes and types of `own`.
void check_state(const std::map<std::string, at::Tensor>& own, const std::map<std::string, at::Tensor>& state);

}  // namespace satchel
