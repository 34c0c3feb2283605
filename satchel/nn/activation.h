// Activations as modules with torch's options. `inplace` is accepted and ignored: what comes out has memory of its own.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/activation.h>
#include <torch/nn/pimpl.h>

#include <utility>

#include "satchel/autograd/save_policy.h"

namespace satchel::nn {

/// What all of them have.
template <class Derived, class Options>
class ActivationModule : public torch::nn::Cloneable<Derived> {
 public:
  explicit ActivationModule(const Options& given = {}, SavePolicy how = {}) : options(given), saving(std::move(how)) {}
  void reset() override {}

  Options options;
  SavePolicy saving;
};

/// After a satchel norm it takes over what the norm would keep (autograd/norm.h).
class ReLUImpl : public ActivationModule<ReLUImpl, torch::nn::ReLUOptions> {
 public:
  using ActivationModule::ActivationModule;
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;
};
TORCH_MODULE(ReLU);

class LeakyReLUImpl : public ActivationModule<LeakyReLUImpl, torch::nn::LeakyReLUOptions> {
 public:
  using ActivationModule::ActivationModule;
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;
};
TORCH_MODULE(LeakyReLU);

class ELUImpl : public ActivationModule<ELUImpl, torch::nn::ELUOptions> {
 public:
  using ActivationModule::ActivationModule;
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;
};
TORCH_MODULE(ELU);

class GELUImpl : public ActivationModule<GELUImpl, torch::nn::GELUOptions> {
 public:
  using ActivationModule::ActivationModule;
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;
};
TORCH_MODULE(GELU);

class SiLUImpl : public torch::nn::Cloneable<SiLUImpl> {
 public:
  explicit SiLUImpl(SavePolicy how = {}) : saving(std::move(how)) {}
  void reset() override {}
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  SavePolicy saving;
};
TORCH_MODULE(SiLU);

}  // namespace satchel::nn
