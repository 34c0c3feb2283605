// GraphSAINT folders: adj_full.npz (scipy CSR; its data are weights), feats.npy, and where it has labels class_map.json (a class id or
// a list of 0 and 1 for each node) and role.json (tr, va, te).
#include <algorithm>
#include <charconv>
#include <string_view>

#include "satchel/data/graph_layouts.h"
#include "satchel/data/number_json.h"
#include "satchel/data/printable.h"

namespace satchel {
namespace {

/// labels or targets from class_map.json, and which nodes have one.
class ClassMap final : public NumberSink {
 public:
  ClassMap(const std::string& path, GraphData& data) : path_(path), data_(data), labelled(static_cast<size_t>(data.nodes), 0) {
    read_number_json(path, *this);
    if (!any_) refuse(path, "must have labels", "none");
  }

  void key(const std::string& name) override {
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), node_);
    if (error != std::errc() || end != name.data() + name.size()) refuse(path_ + ": key", "must be the number of a node", printable(name));
    if (node_ < 0 || node_ >= data_.nodes) {
      refuse(path_ + ": key", "must be 0 to " + std::to_string(data_.nodes - 1), std::to_string(node_));
    }
    if (labelled[static_cast<size_t>(node_)] != 0) refuse(field(), "must stand once", "it twice");
    labelled[static_cast<size_t>(node_)] = 1;
  }
  void number(int64_t value) override {
    if (in_list_) return put(value);
    if (any_ && lists_) refuse(field(), "must be a list, as those before", std::to_string(value));
    if (!any_) data_.labels.assign(static_cast<size_t>(data_.nodes), -1);
    any_ = true;
    if (value < 0 || value >= data_.nodes) refuse(field(), "must be 0 to " + std::to_string(data_.nodes - 1), std::to_string(value));
    data_.labels[static_cast<size_t>(node_)] = static_cast<int32_t>(value);
    data_.classes = std::max(data_.classes, value + 1);
  }
  void open_list() override {
    if (any_ && !lists_) refuse(field(), "must be one class id, as those before", "a list");
    in_list_ = true;
    row_.clear();
  }
  void close_list() override {
    in_list_ = false;
    if (!any_) start_lists();
    if (static_cast<int64_t>(row_.size()) != data_.classes) {
      refuse(field(), "must have " + std::to_string(data_.classes) + " labels, as those before", std::to_string(row_.size()));
    }
    std::copy(row_.begin(), row_.end(), data_.targets.begin() + node_ * data_.classes);
  }

 private:
  std::string field() const { return path_ + ": '" + std::to_string(node_) + "'"; }
  void put(int64_t value) {
    if (value != 0 && value != 1)
      refuse(field(), "must have labels 0 or 1", std::to_string(value) + " at position " + std::to_string(row_.size()));
    row_.push_back(static_cast<uint8_t>(value));
  }
  void start_lists() {
    if (row_.empty()) refuse(field(), "must have a label", "an empty list");
    any_ = lists_ = true;
    data_.task = Task::multi_label;
    data_.classes = static_cast<int64_t>(row_.size());
    check_memory(static_cast<uint64_t>(data_.nodes) * row_.size(), path_);
    data_.targets.assign(static_cast<size_t>(data_.nodes) * row_.size(), 0);
  }

  const std::string& path_;
  GraphData& data_;
  std::vector<uint8_t> row_;
  int64_t node_ = 0;
  bool any_ = false, lists_ = false, in_list_ = false;

 public:
  std::vector<uint8_t> labelled;
};

/// tr, va and te of role.json.
class Roles final : public NumberSink {
 public:
  Roles(const std::string& path, int64_t nodes) : path_(path), nodes_(nodes) {
    for (size_t p = 0; p < 3; ++p) parts[p].field = path + ": '" + std::string(kNames[p]) + "'";
    read_number_json(path, *this);
    for (size_t p = 0; p < 3; ++p) {
      if (!seen_[p]) refuse(parts[p].field, "must be there", "nothing");
    }
  }

  void key(const std::string& name) override {
    const auto* const found = std::find(std::begin(kNames), std::end(kNames), name);
    if (found == std::end(kNames)) refuse(path_ + ": key", "must be tr, va or te", printable(name));
    now_ = static_cast<size_t>(found - std::begin(kNames));
    if (seen_[now_]) refuse(parts[now_].field, "must stand once", "it twice");
    seen_[now_] = true;
  }
  void number(int64_t value) override {
    if (!in_list_) refuse(parts[now_].field, "must be a list", std::to_string(value));
    if (static_cast<int64_t>(parts[now_].nodes.size()) == nodes_) refuse(parts[now_].field, "must name a node once", "more than there are");
    parts[now_].nodes.push_back(value);
  }
  void open_list() override { in_list_ = true; }
  void close_list() override { in_list_ = false; }

 private:
  static constexpr std::string_view kNames[] = {"tr", "va", "te"};
  const std::string& path_;
  int64_t nodes_;
  size_t now_ = 0;
  bool seen_[3] = {}, in_list_ = false;

 public:
  std::array<Part, 3> parts;
};

}  // namespace

GraphData load_graph_saint(const std::string& folder, EdgeWeights weights) {
  GraphData data;
  set_adjacency(data, Npz(folder + "/adj_full.npz"), "", weights);

  const std::string feats = folder + "/feats.npy", classes = folder + "/class_map.json", roles = folder + "/role.json";
  const NpyArray array = read_npy(feats, "load");
  check_shape(array, {data.nodes, kAny}, feats + ": shape");
  if (array.shape[1] == 0) refuse(feats, "must have a column", "none");
  data.features.rows = data.nodes;
  data.features.columns = array.shape[1];
  data.features.dense = floats_of(array, feats + ": features");

  if (!exists(classes) && !exists(roles)) return data;
  const ClassMap map(classes, data);
  data.splits.push_back(checked_split(Roles(roles, data.nodes).parts, data.nodes, map.labelled));
  return data;
}

}  // namespace satchel
