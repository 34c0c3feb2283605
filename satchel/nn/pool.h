// Pools as modules with torch's options. What comes out lies in channels_last order.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/pooling.h>
#include <torch/nn/pimpl.h>

#include <utility>

#include "satchel/autograd/save_policy.h"

namespace satchel::nn {

/// Keeps offsets in windows; a window of one number a dimension.
template <size_t D, class Derived>
class MaxPoolModule : public torch::nn::Cloneable<Derived> {
 public:
  explicit MaxPoolModule(const torch::nn::MaxPoolOptions<D>& given, SavePolicy how = {}) : options(given), saving(std::move(how)) {}
  void reset() override {}
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::MaxPoolOptions<D> options;
  SavePolicy saving;
};

/// Keeps nothing.
template <size_t D, class Derived>
class AvgPoolModule : public torch::nn::Cloneable<Derived> {
 public:
  explicit AvgPoolModule(const torch::nn::AvgPoolOptions<D>& given, SavePolicy how = {}) : options(given), saving(std::move(how)) {}
  void reset() override {}
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::AvgPoolOptions<D> options;
  SavePolicy saving;
};

/// Keeps nothing.
template <size_t D, class Options, class Derived>
class AdaptiveAvgPoolModule : public torch::nn::Cloneable<Derived> {
 public:
  explicit AdaptiveAvgPoolModule(const Options& given, SavePolicy how = {}) : options(given), saving(std::move(how)) {}
  void reset() override {}
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  Options options;
  SavePolicy saving;
};

class MaxPool1dImpl : public MaxPoolModule<1, MaxPool1dImpl> {
 public:
  using MaxPoolModule::MaxPoolModule;
};
class MaxPool2dImpl : public MaxPoolModule<2, MaxPool2dImpl> {
 public:
  using MaxPoolModule::MaxPoolModule;
};
class MaxPool3dImpl : public MaxPoolModule<3, MaxPool3dImpl> {
 public:
  using MaxPoolModule::MaxPoolModule;
};
class AvgPool1dImpl : public AvgPoolModule<1, AvgPool1dImpl> {
 public:
  using AvgPoolModule::AvgPoolModule;
};
class AvgPool2dImpl : public AvgPoolModule<2, AvgPool2dImpl> {
 public:
  using AvgPoolModule::AvgPoolModule;
};
class AvgPool3dImpl : public AvgPoolModule<3, AvgPool3dImpl> {
 public:
  using AvgPoolModule::AvgPoolModule;
};
class AdaptiveAvgPool1dImpl : public AdaptiveAvgPoolModule<1, torch::nn::AdaptiveAvgPool1dOptions, AdaptiveAvgPool1dImpl> {
 public:
  using AdaptiveAvgPoolModule::AdaptiveAvgPoolModule;
};
class AdaptiveAvgPool2dImpl : public AdaptiveAvgPoolModule<2, torch::nn::AdaptiveAvgPool2dOptions, AdaptiveAvgPool2dImpl> {
 public:
  using AdaptiveAvgPoolModule::AdaptiveAvgPoolModule;
};
class AdaptiveAvgPool3dImpl : public AdaptiveAvgPoolModule<3, torch::nn::AdaptiveAvgPool3dOptions, AdaptiveAvgPool3dImpl> {
 public:
  using AdaptiveAvgPoolModule::AdaptiveAvgPoolModule;
};
TORCH_MODULE(MaxPool1d);
TORCH_MODULE(MaxPool2d);
TORCH_MODULE(MaxPool3d);
TORCH_MODULE(AvgPool1d);
TORCH_MODULE(AvgPool2d);
TORCH_MODULE(AvgPool3d);
TORCH_MODULE(AdaptiveAvgPool1d);
TORCH_MODULE(AdaptiveAvgPool2d);
TORCH_MODULE(AdaptiveAvgPool3d);

}  // namespace satchel::nn
