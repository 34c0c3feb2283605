// Adam, AdamW and SGD over all parameters in one fused step, with a state that checkpoints hold. Private to this room and tools.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "satchel/train/image_train.h"
#include "satchel/train/loss_scale.h"
#include "satchel/train/schedule.h"
#include "satchel/train/train.h"

namespace satchel {

/// Of all parameters; returns the bytes that it lets go.
int64_t clear_gradients(std::vector<at::Tensor>& parameters);

/// torch's own fused kernels: the same formulas and constants (β .9 and .999, ε 1e-8) as torch.optim's.
class ParameterStep {
 public:
  /// `scale`: what gradients come multiplied by, a power of two; they are divided by it before anything else is done with them.
  ParameterStep(const TrainOptions& options, std::vector<at::Tensor> parameters, double scale = 1);
  /// SGD with the rates of set_rates(); amp fp16 has a loss scale.
  ParameterStep(const ImageTrainOptions& options, std::vector<at::Tensor> parameters);

  /// The largest norm of all gradients together; 0: any.
  void set_clip(double most) { clip_ = most; }
  /// Of the steps to come.
  void set_rates(const Rates& rates) { rates_ = rates; }
  /// What backward starts from: the loss, or the loss times its scale.
  at::Tensor scaled(const at::Tensor& loss) const { return scaler_ ? scaler_->scaled(loss) : loss; }
  const std::optional<LossScaler>& loss_scale() const { return scaler_; }

  /// Returns the bytes that it lets go.
  int64_t clear_gradients() { return satchel::clear_gradients(parameters_); }
  /// Clips where the options say so, and moves the parameters that have a gradient.
  void step();
  /// The loss, or infinity or NaN from the first step on whose scaled gradients were not all finite: who reads the loss learns of it
  /// without another wait. Without a scale the loss itself.
  at::Tensor marked(const at::Tensor& loss) const;

  int64_t parameter_bytes() const;

  /// What the next step reads: "step" (graphs), "0.exp_avg", "0.exp_avg_sq", "0.momentum" …, and the loss scale's.
  std::map<std::string, at::Tensor> state() const;
  /// Throws unless names and shapes are those of state().
  void restore(const std::map<std::string, at::Tensor>& state);

 private:
  void make_state(bool momentum);
  void clip(std::vector<at::Tensor>& gradients) const;

  Optimizer kind_;
  Rates rates_;
  double weight_decay_, clip_ = 0;
  bool nesterov_ = false;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> mean_, square_;  // Adam; SGD: mean_ is the momentum
  at::Tensor steps_;                       // float32, on the parameters' device; images have none
  at::Tensor inverse_, found_;             // float32[1]: 1/scale, and whether a gradient was not finite; undefined without a scale
  std::optional<LossScaler> scaler_;       // images
};

/// Throws `[resume] …` unless `state` has the names, shapes and types of `own`.
void check_state(const std::map<std::string, at::Tensor>& own, const std::map<std::string, at::Tensor>& state);

}  // namespace satchel
