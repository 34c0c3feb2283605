#include "satchel/core/graph_layer.h"

#include <algorithm>
#include <array>

#include "satchel/core/error.h"
#include "satchel/core/layer_table.h"

namespace satchel {
namespace {

template <class... Layer>
std::span<const GraphLayer> layers_of(layer_table::List<Layer...>) {
  static constexpr std::array all{Layer::layer...};
  return all;
}

}  // namespace

std::span<const GraphLayer> graph_layers() { return layers_of(layer_table::GraphLayers{}); }

std::vector<std::string> graph_layer_names() {
  std::vector<std::string> names;
  for (const GraphLayer& layer : graph_layers()) names.emplace_back(layer.name);
  return names;
}

bool is_graph_layer(std::string_view name) { return std::ranges::count(graph_layers(), name, &GraphLayer::name) > 0; }

const GraphLayer& graph_layer(std::string_view name, const char* op) {
  std::string rule = "model must be";
  for (const GraphLayer& layer : graph_layers()) {
    if (layer.name == name) return layer;
    rule += (&layer == &graph_layers().front() ? " " : ", ") + std::string(layer.name);
  }
  fail(op, rule, "'" + std::string(name) + "'");
}

}  // namespace satchel
