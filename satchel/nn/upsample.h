// Upsampling as a module with torch's options.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/upsampling.h>
#include <torch/nn/pimpl.h>

#include "satchel/autograd/save_policy.h"

namespace satchel::nn {

/// Keeps nothing.
class UpsampleImpl : public torch::nn::Cloneable<UpsampleImpl> {
 public:
  explicit UpsampleImpl(const torch::nn::UpsampleOptions& options = {}, SavePolicy saving = {});
  void reset() override {}
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::UpsampleOptions options;
  SavePolicy saving;
};
TORCH_MODULE(Upsample);

}  // namespace satchel::nn
