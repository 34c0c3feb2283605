// Graph layers by name: what options, checkpoints and plans know of a layer. No torch; graph/layer.h makes the modules.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "satchel/core/keep.h"

namespace satchel {

/// A place of a graph layer that keeps something: nodes × `site.width` values.
struct LayerSite {
  Site site;
  std::string part = {};  // which part of the layer: ".nn.lins.1", behind the layer's own name in reports
};

/// All of them, in the order of the forward pass. A weight_input is the layer's x, or, behind an epilogue of the layer, what that gives.
struct LayerSites {
  std::vector<LayerSite> packed;  // methods that pack ask keeps_of() at each
  std::vector<LayerSite> torch;   // where torch's own functions (fp32) keep float32
};

struct GraphLayer {
  std::string_view name;   // in options, checkpoints and JSON: "sage"
  std::string_view title;  // in text: "GraphSAGE"
  /// Are rows of A·x at most √neighbours times as large as those of x? A sum over neighbours may leave float16's range.
  bool averages;
  LayerSites (*sites)(int64_t in, int64_t out);  // of a layer from `in` to `out` columns
};

/// Every layer, in the order in which help and errors name them; core/layer_table.h is the list.
std::span<const GraphLayer> graph_layers();
std::vector<std::string> graph_layer_names();
bool is_graph_layer(std::string_view name);
/// Throws `[op] model must be sage, gcn, …, got 'name'`.
const GraphLayer& graph_layer(std::string_view name, const char* op);

}  // namespace satchel
