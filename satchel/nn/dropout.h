// Dropout as a module with torch's options. `inplace` is accepted and ignored: what comes out has memory of its own.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/dropout.h>
#include <torch/nn/pimpl.h>

#include "satchel/autograd/save_policy.h"

namespace satchel::nn {

/// p = 1, which torch takes, is refused: nothing would be left.
class DropoutImpl : public torch::nn::Cloneable<DropoutImpl> {
 public:
  explicit DropoutImpl(const torch::nn::DropoutOptions& options = {}, SavePolicy saving = {});
  void reset() override {}
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::DropoutOptions options;
  SavePolicy saving;
};
TORCH_MODULE(Dropout);

}  // namespace satchel::nn
