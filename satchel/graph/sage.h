// GraphSAGE with means: (A·x)·Wlᵀ + x·Wrᵀ + b. x is kept once for both weights, and A·x only by the
// methods that follow papers which keep it (theory.md 9).
#pragma once

#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "satchel/autograd/save_policy.h"
#include "satchel/graph/csr.h"
#include "satchel/graph/input.h"
#include "satchel/graph/layer.h"

namespace satchel {

struct SageWeights {
  at::Tensor neighbour, self;  // out × in
  at::Tensor bias;             // out, or undefined
};

/// x is nodes × in on the adjacency's device. Aggregates on the narrower side, forward and backward.
at::Tensor sage(const at::Tensor& x, const Adjacency& a, const SageWeights& weights, const SavePolicy& saving = {});
/// The first layer: reads the data set (and its A·X, where that stands there), keeps references.
at::Tensor sage(const GraphInput& input, const Adjacency& a, const SageWeights& weights, const SavePolicy& saving = {});

using SageOptions = GraphConvOptions;

/// Parameters as PyG's SAGEConv names them: lin_l.weight and lin_l.bias (neighbours), lin_r.weight (the node itself).
class SageConvImpl : public GraphConvImpl {
 public:
  explicit SageConvImpl(const SageOptions& options);
  void reset_parameters() override;
  at::Tensor forward(const at::Tensor& x, const Adjacency& a, bool norm_follows = false) override;
  at::Tensor forward_data(const GraphInput& input, const Adjacency& a, bool norm_follows = false) override;
  at::Tensor torch_forward(const at::Tensor& x, const TorchFunctions& torch) const override;
  void pretty_print(std::ostream& stream) const override;

  SageWeights weights() const;
  SageOptions options;

 private:
  torch::nn::Linear lin_l_ = nullptr, lin_r_ = nullptr;
};
TORCH_MODULE(SageConv);

}  // namespace satchel
