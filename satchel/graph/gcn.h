// Kipf and Welling's layer: A·(x·Wᵀ) + b. Only x is kept (theory.md 9).
#pragma once

#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "satchel/autograd/save_policy.h"
#include "satchel/graph/csr.h"
#include "satchel/graph/input.h"
#include "satchel/graph/layer.h"

namespace satchel {

/// x is nodes × in on the adjacency's device, weight out × in, bias out or undefined. Aggregates on the narrower side.
at::Tensor gcn(const at::Tensor& x, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias = {},
               const SavePolicy& saving = {});
/// The first layer: reads the data set (or its A·X, where that stands there), keeps references.
at::Tensor gcn(const GraphInput& input, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias = {},
               const SavePolicy& saving = {});

using GcnOptions = GraphConvOptions;

/// Parameters as PyG's GCNConv names them: lin.weight, bias.
class GcnConvImpl : public GraphConvImpl {
 public:
  explicit GcnConvImpl(const GcnOptions& options);
  void reset_parameters() override;
  at::Tensor forward(const at::Tensor& x, const Adjacency& a, bool norm_follows = false) override;
  at::Tensor forward_data(const GraphInput& input, const Adjacency& a, bool norm_follows = false) override;
  at::Tensor torch_forward(const at::Tensor& x, const TorchFunctions& torch) const override;
  void pretty_print(std::ostream& stream) const override;

  GcnOptions options;

 private:
  torch::nn::Linear lin_ = nullptr;
  at::Tensor bias_;
};
TORCH_MODULE(GcnConv);

}  // namespace satchel
