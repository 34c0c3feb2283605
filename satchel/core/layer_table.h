// The table of graph layers. A new layer is a struct here, its name in GraphLayers, and a file in satchel/graph that defines factory().
// Private to the library.
#pragma once

#include <string>
#include <utility>

#include "satchel/core/graph_layer.h"

namespace satchel {

struct LayerFactory;  // the half of a layer that needs torch: graph/layer.h

namespace layer_table {

inline LayerSite input(int64_t width, std::string part = {}) { return {{.role = Role::weight_input, .width = width}, std::move(part)}; }
inline LayerSite aggregate(int64_t width) { return {{.role = Role::aggregate, .width = width}}; }

struct Sage {
  static constexpr GraphLayer layer{"sage", "GraphSAGE", true, [](int64_t in, int64_t) -> LayerSites {
                                      return {{input(in), aggregate(in)}, {aggregate(in), input(in)}};
                                    }};
  static const LayerFactory& factory();
};

struct Gcn {
  static constexpr GraphLayer layer{"gcn", "GCN", true, [](int64_t in, int64_t) -> LayerSites { return {{input(in)}, {input(in)}}; }};
  static const LayerFactory& factory();
};

struct Gin {
  static constexpr GraphLayer layer{
      "gin", "GIN", false, [](int64_t in, int64_t out) -> LayerSites {
        const LayerSite relu{{.activation = Activation::relu, .width = out}, ".nn.act"}, second = input(out, ".nn.lins.1");
        return {{input(in), relu, second}, {aggregate(in), relu, second}};
      }};
  static const LayerFactory& factory();
};

template <class... Layer>
struct List {};
using GraphLayers = List<Sage, Gcn, Gin>;

}  // namespace layer_table
}  // namespace satchel
