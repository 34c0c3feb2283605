// The linear layer as a module with torch's options, names and initial values; state dicts are torch's.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/linear.h>
#include <torch/nn/pimpl.h>

#include "satchel/autograd/save_policy.h"

namespace satchel::nn {

class LinearImpl : public torch::nn::Cloneable<LinearImpl> {
 public:
  explicit LinearImpl(const torch::nn::LinearOptions& options, SavePolicy saving = {});
  void reset() override;
  void reset_parameters();
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::LinearOptions options;
  SavePolicy saving;
  at::Tensor weight, bias;  // bias: undefined where the options say so
};
TORCH_MODULE(Linear);

}  // namespace satchel::nn
