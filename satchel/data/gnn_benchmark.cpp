// gnn-benchmark npz (Shchur et al.): adj_* and attr_* as CSR arrays (or attr_matrix), and where it has them labels (−1: none),
// train_idx, val_idx, test_idx.
#include <algorithm>
#include <numeric>

#include "satchel/data/graph_layouts.h"

namespace satchel {
namespace {

/// Columns rising within each row; a column that stands twice in a row is refused.
void sort_rows(SparseArrays& a, const std::string& field) {
  std::vector<int64_t> order;
  std::vector<int32_t> column;
  std::vector<float> value;
  for (int64_t row = 0; row < a.rows; ++row) {
    const auto first = a.column.begin() + a.start[static_cast<size_t>(row)],
               last = a.column.begin() + a.start[static_cast<size_t>(row) + 1];
    if (!std::is_sorted(first, last)) {
      const auto base = a.value.begin() + a.start[static_cast<size_t>(row)];
      order.resize(static_cast<size_t>(last - first));
      std::iota(order.begin(), order.end(), 0);
      std::sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return first[i] < first[j]; });
      column.assign(first, last);
      value.assign(base, base + (last - first));
      for (size_t i = 0; i < order.size(); ++i) {
        first[static_cast<int64_t>(i)] = column[static_cast<size_t>(order[i])];
        base[static_cast<int64_t>(i)] = value[static_cast<size_t>(order[i])];
      }
    }
    if (const auto twice = std::adjacent_find(first, last); twice != last) {
      refuse(field, "must have a column once a row", std::to_string(*twice) + " twice in row " + std::to_string(row));
    }
  }
}

Features sparse_features(const Npz& file, int64_t nodes) {
  SparseArrays a = read_sparse(file, "attr_");
  if (a.rows != nodes) refuse(file.field("attr_shape"), "must have " + std::to_string(nodes) + " rows, one a node", std::to_string(a.rows));
  sort_rows(a, file.field("attr_indices"));
  Features out;
  out.rows = a.rows;
  out.columns = a.columns;
  if (static_cast<int64_t>(a.column.size()) < a.rows * a.columns / 4) {
    out.start = std::move(a.start);
    out.column = std::move(a.column);
    out.value = std::move(a.value);
    return out;
  }
  check_memory(static_cast<uint64_t>(a.rows) * static_cast<uint64_t>(a.columns) * sizeof(float), file.field("attr_shape"));
  out.dense.assign(static_cast<size_t>(a.rows * a.columns), 0.0f);
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t i = a.start[static_cast<size_t>(row)]; i < a.start[static_cast<size_t>(row) + 1]; ++i) {
      out.dense[static_cast<size_t>(row * a.columns + a.column[static_cast<size_t>(i)])] = a.value[static_cast<size_t>(i)];
    }
  }
  return out;
}

Features dense_features(const Npz& file, int64_t nodes) {
  Features out;
  out.dense = file.floats("attr_matrix", {nodes, kAny});
  out.rows = nodes;
  out.columns = static_cast<int64_t>(out.dense.size()) / nodes;
  if (out.columns == 0) refuse(file.field("attr_matrix"), "must have a column", "none");
  return out;
}

}  // namespace

GraphData load_gnn_benchmark(const Npz& file, EdgeWeights weights) {
  GraphData data;
  if (weights == EdgeWeights::use) {
    refuse_edge_features(file, {"edge_attr", "edge_attr_matrix", "edge_attr_data", "edge_features"});
    if (file.has("edge_weight")) refuse(file.field("edge_weight"), "must not be there: weights are adj_data", "it");
  }
  set_adjacency(data, file, "adj_", weights);
  data.features = file.has("attr_matrix") ? dense_features(file, data.nodes) : sparse_features(file, data.nodes);
  const bool split = file.has("train_idx") || file.has("val_idx") || file.has("test_idx");
  if (!split && !file.has("labels")) return data;
  const std::vector<uint8_t> labelled = set_labels(data, file.integers("labels", {data.nodes}), file.field("labels"));
  if (split) {
    const auto part = [&](const std::string& name) { return Part{file.field(name), file.integers(name, {kAny})}; };
    data.splits.push_back(checked_split({part("train_idx"), part("val_idx"), part("test_idx")}, data.nodes, labelled));
  }
  return data;
}

}  // namespace satchel
