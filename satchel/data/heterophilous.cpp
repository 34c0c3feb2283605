// Heterophilous npz (Platonov et al.): node_features, edges (E × 2), and where it has them node_labels (−1: none), edge_weight (E),
// and train_masks, val_masks, test_masks of k splits (k × nodes).
#include <algorithm>

#include "satchel/data/graph_layouts.h"

namespace satchel {
namespace {

constexpr const char* kMasks[] = {"train_masks", "val_masks", "test_masks"};

/// Part `p` of split `k`, and that its nodes are in no part before.
Part part_of(const Npz& file, const std::array<std::vector<int64_t>, 3>& masks, size_t p, int64_t k, int64_t nodes) {
  Part part{file.field(kMasks[p]) + " row " + std::to_string(k), {}};
  for (int64_t node = 0; node < nodes; ++node) {
    const auto at = static_cast<size_t>(k * nodes + node);
    if (masks[p][at] == 0) continue;
    for (size_t before = 0; before < p; ++before) {
      if (masks[before][at] == 0) continue;
      refuse(part.field, std::string("must be false where ") + kMasks[before] + " is true", "true at position " + std::to_string(node));
    }
    part.nodes.push_back(node);
  }
  return part;
}

std::vector<Split> read_splits(const Npz& file, int64_t nodes, const std::vector<uint8_t>& labelled) {
  std::array<std::vector<int64_t>, 3> masks;
  masks[0] = file.integers(kMasks[0], {kAny, nodes});
  const int64_t count = static_cast<int64_t>(masks[0].size()) / nodes;
  for (size_t p = 1; p < 3; ++p) masks[p] = file.integers(kMasks[p], {count, nodes});
  for (size_t p = 0; p < 3; ++p) check_range(masks[p], 0, 1, file.field(kMasks[p]));
  std::vector<Split> splits;
  for (int64_t k = 0; k < count; ++k) {
    splits.push_back(checked_split(
        {part_of(file, masks, 0, k, nodes), part_of(file, masks, 1, k, nodes), part_of(file, masks, 2, k, nodes)}, nodes, labelled));
  }
  return splits;
}

std::vector<float> read_weights(const Npz& file, int64_t edges) {
  refuse_edge_features(file, {"edge_attr", "edge_feat", "edge_features"});
  for (const char* name : {"edge_weight", "edge_weights"}) {
    if (file.has(name)) return checked_weights(file.floats(name, {edges}), file.field(name));
  }
  return {};
}

}  // namespace

GraphData load_heterophilous(const Npz& file, EdgeWeights weights) {
  GraphData data;
  const NpyHeader header = file.header("node_features");
  check_shape(header, {kAny, kAny}, file.field("node_features"));
  check_range(header.shape, 1, kMaxNodes, file.field("node_features") + " sizes");
  data.nodes = header.shape[0];
  data.features.rows = header.shape[0];
  data.features.columns = header.shape[1];
  data.features.dense = file.floats("node_features", {data.nodes, data.features.columns});

  const std::vector<int64_t> edges = file.integers("edges", {kAny, 2});
  check_range(edges, 0, data.nodes - 1, file.field("edges"));
  set_edges(data, std::vector<int32_t>(edges.begin(), edges.end()),
            weights == EdgeWeights::use ? read_weights(file, static_cast<int64_t>(edges.size() / 2)) : std::vector<float>());

  const bool split = std::any_of(std::begin(kMasks), std::end(kMasks), [&](const char* name) { return file.has(name); });
  if (!split && !file.has("node_labels")) return data;
  const std::vector<uint8_t> labelled = set_labels(data, file.integers("node_labels", {data.nodes}), file.field("node_labels"));
  if (data.classes == 2) {
    data.task = Task::binary;
    data.classes = 1;
  }
  if (split) data.splits = read_splits(file, data.nodes, labelled);
  return data;
}

}  // namespace satchel
