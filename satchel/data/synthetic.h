// A made-up graph that trains like a real one, the same on every machine for the same options.
//
//   synthetic:arxiv                      169,343 nodes, 1,166,243 edges, 128 features, 40 classes
//   synthetic:arxiv,scale=0.1            any option may follow
//   synthetic:nodes=…,edges=…,features=…,classes=…[,seed=0][,scale=1][,task=single][,homophily=0.6]
//
// Every node belongs to a group, and the groups carry the labels. A node drifts towards one rival group by a share of its own, the
// mean of which is 1 − homophily: so many of its edges lead to the rival, and its features lean as far. Nodes that drift past one
// half look like their rival and bound what any model can reach. Within a group the node of rank r is a target with density r^−2/3,
// so degrees follow a power law (of exponent 2.5). A feature is the group's mean plus noise of variance 1, too weak to tell the
// groups apart by itself.
#pragma once

#include <cstdint>
#include <string_view>

#include "satchel/data/graph_data.h"

namespace satchel {

struct SyntheticOptions {
  int64_t nodes = 169343, edges = 1166243;  // edges: distinct, one direction, no loops; at most nodes·(nodes − 1)/8
  int64_t features = 128;
  int64_t classes = 40;  // single: groups; multi: labels of a node; binary: 2
  uint64_t seed = 0;
  Task task = Task::single_label;
  double homophily = 0.6;  // share of edges within a group, 0 to 1
};

/// What stands after "synthetic:". `scale` multiplies nodes and edges.
SyntheticOptions parse_synthetic(std::string_view text);

/// With one split of 54/18/28 percent, arxiv's own shares.
GraphData make_synthetic(const SyntheticOptions& options);

}  // namespace satchel
