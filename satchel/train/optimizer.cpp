#include "satchel/train/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <utility>

#include "satchel/core/error.h"

namespace satchel {
namespace {

constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8;

}  // namespace

int64_t clear_gradients(std::vector<at::Tensor>& parameters) {
  int64_t bytes = 0;
  for (at::Tensor& p : parameters) {
    if (p.grad().defined()) bytes += static_cast<int64_t>(p.grad().nbytes());
    p.mutable_grad() = at::Tensor();
  }
  return bytes;
}

ParameterStep::ParameterStep(const TrainOptions& options, std::vector<at::Tensor> parameters, double scale)
    : kind_(options.optimizer),
      rates_{options.lr, options.momentum},
      weight_decay_(options.weight_decay),
      clip_(options.clip),
      parameters_(std::move(parameters)) {
  make_state(options.momentum > 0);
  steps_ = at::zeros({}, parameters_.front().options().requires_grad(false));
  if (scale == 1) return;
  if (int exponent = 0; !std::isfinite(scale) || std::frexp(scale, &exponent) != 0.5) fail("train", "scale must be a power of two", scale);
  inverse_ = at::full({1}, 1 / scale, parameters_.front().options().requires_grad(false));
  found_ = at::zeros_like(inverse_);
}

ParameterStep::ParameterStep(const ImageTrainOptions& options, std::vector<at::Tensor> parameters)
    : kind_(Optimizer::sgd),
      rates_{options.lr, options.momentum},
      weight_decay_(options.weight_decay),
      nesterov_(options.nesterov),
      parameters_(std::move(parameters)) {
  make_state(options.momentum > 0 || options.schedule == Decay::onecycle);
  if (options.amp == Amp::fp16) scaler_.emplace(options.loss_scale, parameters_.front().device());
}

void ParameterStep::make_state(bool momentum) {
  if (parameters_.empty()) fail("train", "a model must have parameters", 0);
  const at::NoGradGuard guard;
  const bool adam = kind_ != Optimizer::sgd;
  for (const at::Tensor& p : parameters_) {
    if (adam || momentum) mean_.push_back(at::zeros_like(p));
    if (adam) square_.push_back(at::zeros_like(p));
  }
}

int64_t ParameterStep::parameter_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& p : parameters_) bytes += static_cast<int64_t>(p.nbytes());
  return bytes;
}

void ParameterStep::clip(std::vector<at::Tensor>& gradients) const {
  const at::Tensor norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients)));
  at::_foreach_mul_(gradients, norm.add(1e-6).reciprocal().mul(clip_).clamp_max(1));  // 1e-6: as torch's clip_grad_norm_
}

void ParameterStep::step() {
  const at::NoGradGuard guard;
  std::vector<at::Tensor> moved, gradients, mean, square;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].grad().defined()) continue;
    moved.push_back(parameters_[i]);
    gradients.push_back(parameters_[i].grad());
    if (!mean_.empty()) mean.push_back(mean_[i]);
    if (!square_.empty()) square.push_back(square_[i]);
  }
  if (moved.empty()) return;
  if (inverse_.defined()) at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_, inverse_);
  std::optional<at::Tensor> found;
  if (scaler_) {
    scaler_->unscale_(gradients);
    found = scaler_->found();
  }
  if (clip_ > 0) clip(gradients);
  if (steps_.defined()) steps_.add_(1);
  const std::vector<at::Tensor> steps(moved.size(), steps_);
  switch (kind_) {
    case Optimizer::adam:
      at::_fused_adam_(moved, gradients, mean, square, {}, steps, rates_.lr, kBeta1, kBeta2, weight_decay_, kEps, false, false);
      break;
    case Optimizer::adamw:
      at::_fused_adamw_(moved, gradients, mean, square, {}, steps, rates_.lr, kBeta1, kBeta2, weight_decay_, kEps, false, false);
      break;
    case Optimizer::sgd:  // momentum starts as zeros: its first value is the gradient, as torch's
      at::_fused_sgd_(moved, gradients, mean, weight_decay_, mean.empty() ? 0 : rates_.momentum, rates_.lr, 0, nesterov_ && !mean.empty(),
                      false, false, {}, found);
      break;
  }
  if (scaler_) scaler_->update();
}

at::Tensor ParameterStep::marked(const at::Tensor& loss) const {
  return found_.defined() ? loss.div(at::rsub(found_, 1).reshape(loss.sizes())) : loss;  // by 1, or by 0
}

std::map<std::string, at::Tensor> ParameterStep::state() const {
  std::map<std::string, at::Tensor> all = scaler_ ? scaler_->state() : std::map<std::string, at::Tensor>();
  if (steps_.defined()) all["step"] = steps_;
  const bool adam = kind_ != Optimizer::sgd;
  for (size_t i = 0; i < mean_.size(); ++i) all[std::to_string(i) + (adam ? ".exp_avg" : ".momentum")] = mean_[i];
  for (size_t i = 0; i < square_.size(); ++i) all[std::to_string(i) + ".exp_avg_sq"] = square_[i];
  return all;
}

void check_state(const std::map<std::string, at::Tensor>& own, const std::map<std::string, at::Tensor>& state) {
  if (state.size() != own.size()) fail("resume", "optimizer must have " + std::to_string(own.size()) + " tensors", state.size());
  for (const auto& [name, tensor] : own) {
    const auto found = state.find(name);
    if (found == state.end()) fail("resume", "checkpoint must hold optimizer." + name, "none");
    if (found->second.sizes() != tensor.sizes() || found->second.scalar_type() != tensor.scalar_type())
      fail("resume", "optimizer." + name + " must have the parameter's shape and type", found->second.sizes());
  }
}

void ParameterStep::restore(const std::map<std::string, at::Tensor>& state) {
  const at::NoGradGuard guard;
  const std::map<std::string, at::Tensor> own = this->state();
  check_state(own, state);
  for (const auto& [name, tensor] : own) tensor.copy_(state.at(name));
  if (scaler_) scaler_->restore(state);
}

}  // namespace satchel
