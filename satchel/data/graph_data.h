// A graph data set in memory, as its files have it. Torch-free: parsers of untrusted files build and are tested without torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace satchel {

enum class Task : uint8_t { single_label, multi_label, binary };  // accuracy, micro-F1, ROC AUC

/// rows × columns numbers, dense in rows, or by the entries of each row.
struct Features {
  int64_t rows = 0, columns = 0;
  std::vector<float> dense;     // rows × columns; empty where sparse
  std::vector<int64_t> start;   // sparse: rows + 1
  std::vector<int32_t> column;  // sparse: rising within a row
  std::vector<float> value;
  bool sparse() const { return !start.empty(); }
};

struct Split {
  std::vector<int64_t> train, valid, test;  // nodes, rising
};

/// What a loader does with weights of edges that are not all 1.
enum class EdgeWeights : uint8_t { use, ignore };

struct GraphData {
  std::string name;
  std::string source;  // what load_graph was given, for errors
  int64_t nodes = 0;
  std::vector<int64_t> start;  // edges of node i: target[start[i]] … target[start[i + 1] − 1]; as stored, one direction
  std::vector<int32_t> target;
  std::vector<float> weight;  // one an edge, 0 or more; empty: all are 1
  Features features;
  Task task = Task::single_label;
  int64_t classes = 0;           // outputs of a model: classes, labels, or 1 for binary
  std::vector<int32_t> labels;   // single label and binary: one a node, −1 where a node has none and is in no split
  std::vector<uint8_t> targets;  // multi-label: nodes × classes, 0 or 1
  std::vector<Split> splits;     // as given; empty: draw one

  bool has_labels() const { return !labels.empty() || !targets.empty(); }
};

/// A folder (GraphSAINT, OGB raw), an npz file (gnn-benchmark, heterophilous) or "synthetic:…" (synthetic.h). The layout is
/// found from what is there. Without labels (nothing to train on, but enough to predict) labels, targets and splits are empty and
/// classes is 0. Throws `[load] rule, got value` that names file, field and position.
GraphData load_graph(const std::string& where, EdgeWeights weights = EdgeWeights::use);

/// Split `index` of those given (modulo their number), or 60/20/20 per class drawn from the seed; nodes without a label are in none.
Split split_of(const GraphData& data, uint64_t seed, int64_t index = 0);

}  // namespace satchel
