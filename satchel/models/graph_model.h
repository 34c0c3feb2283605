// A stack of graph layers: conv → norm → activation → dropout, and a last conv that gives the logits.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <vector>

#include "satchel/core/method.h"
#include "satchel/graph/csr.h"
#include "satchel/graph/input.h"
#include "satchel/graph/layer.h"
#include "satchel/nn/norm.h"
#include "satchel/plan/graph_plan.h"

namespace satchel {

class WeightCasts;

struct GraphModelOptions {
  GraphShape shape;  // plan/graph_plan.h: conv, layers, widths, norm, activation, dropout
  Method method = parse_method("satchel");
  Amp amp = Amp::none;  // bf16, fp16: features and what flows between layers; weights, statistics and forward()'s logits are float32
};

/// What features and activations are kept in; throws on `automatic`, which a run decides first.
at::ScalarType activation_type(Amp amp);

/// Modules convs.0, norms.0, convs.1 …; plan_graph() tells what it keeps.
class GraphModelImpl : public torch::nn::Module {
 public:
  explicit GraphModelImpl(const GraphModelOptions& options);
  /// Logits, nodes × classes, float32. Where gradients are recorded, keeps what the method keeps.
  at::Tensor forward(const GraphInput& input, const Adjacency& a);
  /// The same logits in the type of activations, which the losses take as they are.
  at::Tensor logits(const GraphInput& input, const Adjacency& a);
  /// … of the last layer's targets alone: `last` is rows_for(a, nodes), and there are two layers at least.
  at::Tensor logits(const GraphInput& input, const Adjacency& a, const Adjacency& last);
  /// Takes the memory that training in 16 bits needs for casts of the weights, where it does not stand yet: bytes. forward() does so
  /// otherwise.
  int64_t reserve_casts();
  const GraphModelOptions& options() const { return options_; }
  const std::vector<std::shared_ptr<GraphConvImpl>>& convs() const { return convs_; }

 private:
  bool casts_weights() const;
  std::vector<at::Tensor> layer_weights() const;

  GraphModelOptions options_;
  at::ScalarType type_;  // of activations
  std::vector<std::shared_ptr<GraphConvImpl>> convs_;
  std::vector<nn::NormAct> norms_;
  std::shared_ptr<WeightCasts> casts_;  // of training in 16 bits
};
TORCH_MODULE(GraphModel);

}  // namespace satchel
