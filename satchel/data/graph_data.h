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

struct GraphData {
  std::string name;
  int64_t nodes = 0;
  std::vector<int64_t> start;  // edges of node i: target[start[i]] … target[start[i + 1] − 1]; as stored, one direction
  std::vector<int32_t> target;
  Features features;
  Task task = Task::single_label;
  int64_t classes = 0;           // outputs of a model: classes, labels, or 1 for binary
  std::vector<int32_t> labels;   // single label and binary: one a node, −1 where a node of no split has none
  std::vector<uint8_t> targets;  // multi-label: nodes × classes, 0 or 1
  std::vector<Split> splits;     // as given; empty: draw one
};

/// A folder (GraphSAINT, OGB raw), an npz file (gnn-benchmark, heterophilous) or "synthetic:…" (synthetic.h). The layout is
/// found from what is there. Throws `[load] rule, got value` that names file, field and position.
GraphData load_graph(const std::string& where);

/// Split `index` of those given (modulo their number), or 60/20/20 per class drawn from the seed.
Split split_of(const GraphData& data, uint64_t seed, int64_t index = 0);

}  // namespace satchel
