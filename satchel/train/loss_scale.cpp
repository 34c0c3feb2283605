#include "satchel/train/loss_scale.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/zeros.h>

#include "satchel/core/error.h"

namespace satchel {

LossScaler::LossScaler(const LossScale& options, at::Device device) : options_(options) {
  const auto of = [&](at::ScalarType type) { return at::TensorOptions().dtype(type).device(device); };
  scale_ = at::full({1}, options.initial, of(at::kFloat));
  growth_ = at::zeros({1}, of(at::kInt));
  found_ = at::zeros({1}, of(at::kFloat));
  skipped_ = at::zeros({1}, of(at::kLong));
}

at::Tensor LossScaler::scaled(const at::Tensor& loss) const { return loss.mul(scale_.reshape({})); }

void LossScaler::unscale_(std::vector<at::Tensor> gradients) {
  const at::NoGradGuard guard;
  found_.zero_();
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_, at::reciprocal(scale_));
}

void LossScaler::update() {
  const at::NoGradGuard guard;
  skipped_.add_(found_.to(at::kLong));
  at::_amp_update_scale_(scale_, growth_, found_, options_.growth, options_.backoff, options_.interval);
}

double LossScaler::scale() const { return scale_.item<double>(); }

int64_t LossScaler::skipped() const { return skipped_.item<int64_t>(); }

std::map<std::string, at::Tensor> LossScaler::state() const {
  return {{"scale", scale_}, {"growth", growth_.to(at::kLong)}, {"skipped", skipped_}};
}

void LossScaler::restore(const std::map<std::string, at::Tensor>& state) {
  const at::NoGradGuard guard;
  for (auto [name, own] : {std::pair{"scale", scale_}, {"growth", growth_}, {"skipped", skipped_}}) {
    const auto found = state.find(name);
    if (found == state.end()) fail("resume", std::string("checkpoint must hold the loss scale's ") + name, "none");
    if (found->second.sizes() != own.sizes())
      fail("resume", std::string("the loss scale's ") + name + " must be one number", found->second.sizes());
    own.copy_(found->second);
  }
}

}  // namespace satchel
