// Convolutions as modules with torch's options, names and initial values; state dicts are torch's. What comes out lies in channels_last
// order.
#pragma once

#include <torch/nn/modules/common.h>
#include <torch/nn/modules/conv.h>

#include <memory>
#include <optional>
#include <utility>

#include "satchel/autograd/conv.h"

namespace satchel::nn {

/// Everything but forward is torch's: options, weight, bias, reset_parameters(), clone(). Paddings are numbers, "same" or "valid", of
/// zeros, reflected, replicated or circular values.
template <size_t D, class Derived>
class ConvModule : public torch::nn::ConvNdImpl<D, Derived> {
 public:
  explicit ConvModule(const torch::nn::ConvOptions<D>& options, SavePolicy saving = {});
  at::Tensor forward(const at::Tensor& x) { return forward_in_block(x, nullptr); }
  /// … of a residual block's input, whose gradients meet here (autograd/shared_gradient.h); null: autograd adds them up.
  at::Tensor forward_in_block(const at::Tensor& x, const std::shared_ptr<SharedGradient>& x_gradient);
  void pretty_print(std::ostream& stream) const override;

  SavePolicy saving;
};

template <size_t D, class Derived>
class ConvTransposeModule : public torch::nn::ConvNdImpl<D, Derived> {
 public:
  explicit ConvTransposeModule(const torch::nn::ConvTransposeOptions<D>& options, SavePolicy saving = {});
  /// `output_size`: the spatial sizes wanted, where the stride leaves a choice.
  at::Tensor forward(const at::Tensor& x, const std::optional<at::IntArrayRef>& output_size = std::nullopt);
  void pretty_print(std::ostream& stream) const override;

  SavePolicy saving;
};

class Conv1dImpl : public ConvModule<1, Conv1dImpl> {
 public:
  using ConvModule::ConvModule;
};
class Conv2dImpl : public ConvModule<2, Conv2dImpl> {
 public:
  using ConvModule::ConvModule;
};
class Conv3dImpl : public ConvModule<3, Conv3dImpl> {
 public:
  using ConvModule::ConvModule;
};
TORCH_MODULE(Conv1d);
TORCH_MODULE(Conv2d);
TORCH_MODULE(Conv3d);

class ConvTranspose1dImpl : public ConvTransposeModule<1, ConvTranspose1dImpl> {
 public:
  using ConvTransposeModule::ConvTransposeModule;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<at::IntArrayRef>())})
};
class ConvTranspose2dImpl : public ConvTransposeModule<2, ConvTranspose2dImpl> {
 public:
  using ConvTransposeModule::ConvTransposeModule;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<at::IntArrayRef>())})
};
class ConvTranspose3dImpl : public ConvTransposeModule<3, ConvTranspose3dImpl> {
 public:
  using ConvTransposeModule::ConvTransposeModule;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<at::IntArrayRef>())})
};
TORCH_MODULE(ConvTranspose1d);
TORCH_MODULE(ConvTranspose2d);
TORCH_MODULE(ConvTranspose3d);

}  // namespace satchel::nn
