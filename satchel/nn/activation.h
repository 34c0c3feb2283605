// Activations as modules with torch's options. `inplace` is accepted and ignored: what comes out has memory of its own.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/activation.h>
#include <torch/nn/pimpl.h>

#include "satchel/autograd/save_policy.h"

namespace satchel::nn {

/// After a satchel norm it takes over what the norm would keep (autograd/norm.h).
class ReLUImpl : public torch::nn::Cloneable<ReLUImpl> {
 public:
  explicit ReLUImpl(const torch::nn::ReLUOptions& options = {}, SavePolicy saving = {});
  void reset() override {}
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::ReLUOptions options;
  SavePolicy saving;
};
TORCH_MODULE(ReLU);

class LeakyReLUImpl : public torch::nn::Cloneable<LeakyReLUImpl> {
 public:
  explicit LeakyReLUImpl(const torch::nn::LeakyReLUOptions& options = {}, SavePolicy saving = {});
  void reset() override {}
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::LeakyReLUOptions options;
  SavePolicy saving;
};
TORCH_MODULE(LeakyReLU);

class ELUImpl : public torch::nn::Cloneable<ELUImpl> {
 public:
  explicit ELUImpl(const torch::nn::ELUOptions& options = {}, SavePolicy saving = {});
  void reset() override {}
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::ELUOptions options;
  SavePolicy saving;
};
TORCH_MODULE(ELU);

class GELUImpl : public torch::nn::Cloneable<GELUImpl> {
 public:
  explicit GELUImpl(const torch::nn::GELUOptions& options = {}, SavePolicy saving = {});
  void reset() override {}
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::GELUOptions options;
  SavePolicy saving;
};
TORCH_MODULE(GELU);

class SiLUImpl : public torch::nn::Cloneable<SiLUImpl> {
 public:
  explicit SiLUImpl(SavePolicy saving = {});
  void reset() override {}
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  SavePolicy saving;
};
TORCH_MODULE(SiLU);

}  // namespace satchel::nn
