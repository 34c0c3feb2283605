#include "satchel/graph/layer.h"

#include <ATen/ops/linear.h>

#include <array>

#include "satchel/core/layer_table.h"

namespace satchel {
namespace {

template <class... Layer>
const LayerFactory& factory_at(size_t row, layer_table::List<Layer...>) {
  return std::array{&Layer::factory...}.at(row)();
}

const LayerFactory& factory_of(std::string_view name) {
  const auto row = static_cast<size_t>(&graph_layer(name, "layer") - graph_layers().data());
  return factory_at(row, layer_table::GraphLayers{});
}

}  // namespace

at::Tensor TorchFunctions::linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) const {
  return at::linear(x.to(type), weight.to(type), bias.defined() ? bias.to(type) : bias);
}

std::shared_ptr<GraphConvImpl> make_layer(std::string_view name, const GraphConvOptions& options) { return factory_of(name).make(options); }

Adjacency layer_adjacency(std::string_view name, const Csr& graph, bool self_loops) {
  return factory_of(name).adjacency(graph, self_loops);
}

}  // namespace satchel
