// A graph layer as a module, made by its name. core/graph_layer.h has what plans and options know of it.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string_view>

#include "satchel/autograd/save_policy.h"
#include "satchel/core/graph_layer.h"
#include "satchel/graph/csr.h"
#include "satchel/graph/input.h"

namespace satchel {

struct GraphConvOptions {
  int64_t in = 0, out = 0;
  bool bias = true;
  SavePolicy saving = {};
};

/// torch's own functions, as a baseline calls them.
struct TorchFunctions {
  std::function<at::Tensor(const at::Tensor& x)> aggregate;  // A·x
  at::ScalarType type = at::kFloat;                          // of linear()'s product
  /// x·Wᵀ + b; the bias may be undefined.
  at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {}) const;
};

/// Parameters have the names and first values that PyG gives them. It keeps what the sites of its GraphLayer say.
class GraphConvImpl : public torch::nn::Module {
 public:
  virtual void reset_parameters() = 0;
  /// nodes × out from x, nodes × in on the adjacency's device.
  /// `norm_follows`: as SavePolicy has it.
  virtual at::Tensor forward(const at::Tensor& x, const Adjacency& a, bool norm_follows = false) = 0;
  /// The first layer's: keeps references to the data set.
  virtual at::Tensor forward_data(const GraphInput& input, const Adjacency& a, bool norm_follows = false) = 0;
  /// The same values from torch's own functions alone: what benchmarks and tests compare with.
  virtual at::Tensor torch_forward(const at::Tensor& x, const TorchFunctions& torch) const = 0;

 protected:
  static SavePolicy before_norm(SavePolicy saving, bool norm_follows) {
    saving.norm_follows = norm_follows;
    return saving;
  }
};

/// The half of a layer that needs torch; its file defines it for its struct in core/layer_table.h.
struct LayerFactory {
  Adjacency (*adjacency)(const Csr& graph, bool self_loops);
  std::shared_ptr<GraphConvImpl> (*make)(const GraphConvOptions& options);
};

/// The layer of this name; throws `[layer] model must be …, got 'name'`.
std::shared_ptr<GraphConvImpl> make_layer(std::string_view name, const GraphConvOptions& options);
/// A as that layer reads it, from a symmetric graph without self-loops. `self_loops`: a node counts itself, where the layer leaves it out
/// otherwise.
Adjacency layer_adjacency(std::string_view name, const Csr& graph, bool self_loops = false);

}  // namespace satchel
