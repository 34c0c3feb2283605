// Kipf and Welling's layer: A·(x·Wᵀ) + b. Only x is kept (theory.md 9).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "satchel/autograd/save_policy.h"
#include "satchel/graph/csr.h"
#include "satchel/graph/input.h"

namespace satchel {

/// x is nodes × in on the adjacency's device, weight out × in, bias out or undefined. Aggregates on the narrower side.
at::Tensor gcn(const at::Tensor& x, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias = {},
               const SavePolicy& saving = {});
/// The first layer: reads the data set (or its A·X, where that stands there), keeps references.
at::Tensor gcn(const GraphInput& input, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias = {},
               const SavePolicy& saving = {});

struct GcnOptions {
  int64_t in = 0, out = 0;
  bool bias = true;
  SavePolicy saving = {};
};

/// Parameters as PyG's GCNConv names them: lin.weight, bias.
class GcnConvImpl : public torch::nn::Module {
 public:
  explicit GcnConvImpl(const GcnOptions& options);
  void reset_parameters();
  at::Tensor forward(const at::Tensor& x, const Adjacency& a);
  /// The first layer's: keeps references to the data set.
  at::Tensor forward_data(const GraphInput& input, const Adjacency& a);
  void pretty_print(std::ostream& stream) const override;

  GcnOptions options;

 private:
  torch::nn::Linear lin_ = nullptr;
  at::Tensor bias_;
};
TORCH_MODULE(GcnConv);

}  // namespace satchel
