// A Sequential of torch's layers as one of satchel's. C++ modules cannot be changed in place: a hand-written one keeps calling its typed
// members, and Sequential its own list, so a new one is built beside the old.
#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "satchel/autograd/save_policy.h"

namespace satchel::nn {

/// A Sequential that can stand inside another: torch's own forward is a template, which no Sequential takes.
class StackImpl : public torch::nn::SequentialImpl {
 public:
  using SequentialImpl::SequentialImpl;
  at::Tensor forward(const at::Tensor& x) { return SequentialImpl::forward(x); }
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(Stack);

struct Converted {
  torch::nn::Sequential model;
  std::vector<std::string> converted, left;  // names of layers, as named_modules() has them: "0", "3.1"
};

/// Names and order stay. Converted layers share parameters and buffers with the old ones (an optimizer of the old model trains the new
/// one) and are in the same mode; Stacks inside are converted too; every other module is left as it is and stands in both. `saving`:
/// method and bit shares; each layer saves by its own name, after saving.name where that is given.
Converted convert(const torch::nn::Sequential& model, const SavePolicy& saving);
Converted convert(const torch::nn::Sequential& model, const Method& method);

}  // namespace satchel::nn
