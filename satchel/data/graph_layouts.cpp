#include "satchel/data/graph_layouts.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <memory>
#include <sstream>

#include "satchel/data/printable.h"

namespace satchel {
namespace {

void check_start(std::span<const int64_t> start, int64_t entries, const std::string& field) {
  if (start.front() != 0) refuse(field, "must start with 0", std::to_string(start.front()) + " at position 0");
  for (size_t i = 1; i < start.size(); ++i) {
    if (start[i] < start[i - 1]) {
      refuse(field, "must not fall",
             std::to_string(start[i]) + " after " + std::to_string(start[i - 1]) + " at position " + std::to_string(i));
    }
  }
  if (start.back() != entries) {
    refuse(field, "must end with the number of indices, " + std::to_string(entries),
           std::to_string(start.back()) + " at position " + std::to_string(start.size() - 1));
  }
}

}  // namespace

bool exists(const std::string& path) {
  struct stat about {};
  return ::stat(path.c_str(), &about) == 0;
}

bool is_folder(const std::string& path) {
  struct stat about {};
  return ::stat(path.c_str(), &about) == 0 && S_ISDIR(about.st_mode);
}

std::vector<std::string> names_in(const std::string& folder) {
  const auto close = [](DIR* open) { ::closedir(open); };
  const std::unique_ptr<DIR, decltype(close)> open(::opendir(folder.c_str()), close);
  if (!open) fail("load", "folder must be readable", folder);
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(open.get())) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string listed(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i == 16) return out + ", … (" + std::to_string(names.size()) + " in all)";
    out += (i > 0 ? ", " : "") + printable(names[i]);
  }
  return out.empty() ? "nothing" : out;
}

SparseArrays read_sparse(const Npz& file, const std::string& prefix) {
  if (const std::string format = prefix + "format"; file.has(format) && file.text(format) != "csr") {
    refuse(file.field(format), "must be csr", printable(file.text(format)));
  }
  SparseArrays out;
  const std::vector<int64_t> shape = file.integers(prefix + "shape", {2});
  check_range(shape, 1, kMaxNodes, file.field(prefix + "shape"));
  out.rows = shape[0];
  out.columns = shape[1];
  out.start = file.integers(prefix + "indptr", {out.rows + 1});
  const std::vector<int64_t> column = file.integers(prefix + "indices", {kAny});
  const auto entries = static_cast<int64_t>(column.size());
  check_start(out.start, entries, file.field(prefix + "indptr"));
  check_range(column, 0, out.columns - 1, file.field(prefix + "indices"));
  out.column.assign(column.begin(), column.end());
  out.value = file.floats(prefix + "data", {entries});
  return out;
}

void set_adjacency(GraphData& data, const Npz& file, const std::string& prefix, EdgeWeights weights) {
  SparseArrays arrays = read_sparse(file, prefix);
  if (arrays.rows != arrays.columns) {
    refuse(file.field(prefix + "shape"), "must be square", std::to_string(arrays.rows) + " by " + std::to_string(arrays.columns));
  }
  data.nodes = arrays.rows;
  data.start = std::move(arrays.start);
  data.target = std::move(arrays.column);
  if (weights == EdgeWeights::use) data.weight = checked_weights(std::move(arrays.value), file.field(prefix + "data"));
}

std::vector<float> checked_weights(std::vector<float> weight, const std::string& field) {
  for (size_t i = 0; i < weight.size(); ++i) {
    if (weight[i] >= 0) continue;
    std::ostringstream got;
    got << weight[i] << " at position " << i;
    refuse(field, "must be 0 or more, as weights of edges are (--unweighted takes edges without their weights)", got.str());
  }
  if (std::all_of(weight.begin(), weight.end(), [](float w) { return w == 1.0f; })) weight.clear();
  return weight;
}

void refuse_edge_features(const Npz& file, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (file.has(name))
      refuse(file.field(name), "must not be there: edges may have weights, no features (--unweighted takes edges without either)", "it");
  }
}

void set_edges(GraphData& data, std::span<const int32_t> pairs, std::vector<float> weight) {
  data.start.assign(static_cast<size_t>(data.nodes) + 1, 0);
  for (size_t i = 0; i < pairs.size(); i += 2) ++data.start[static_cast<size_t>(pairs[i]) + 1];
  for (size_t i = 1; i < data.start.size(); ++i) data.start[i] += data.start[i - 1];
  std::vector<int64_t> next(data.start.begin(), data.start.end() - 1);
  data.target.resize(pairs.size() / 2);
  data.weight.resize(weight.size());
  for (size_t i = 0; i < pairs.size(); i += 2) {
    const auto at = static_cast<size_t>(next[static_cast<size_t>(pairs[i])]++);
    data.target[at] = pairs[i + 1];
    if (!weight.empty()) data.weight[at] = weight[i / 2];
  }
}

Split checked_split(std::array<Part, 3> parts, int64_t nodes, std::span<const uint8_t> labelled) {
  if (parts[0].nodes.empty()) refuse(parts[0].field, "must have a node to train on", "none");
  std::vector<uint8_t> part_of(static_cast<size_t>(nodes), 0);
  for (size_t p = 0; p < parts.size(); ++p) {
    const std::string& field = parts[p].field;
    const std::vector<int64_t>& members = parts[p].nodes;
    check_range(members, 0, nodes - 1, field);
    for (size_t i = 0; i < members.size(); ++i) {
      const auto got = [&] { return std::to_string(members[i]) + " at position " + std::to_string(i); };
      uint8_t& in = part_of[static_cast<size_t>(members[i])];
      if (in == p + 1) refuse(field, "must name a node once", got());
      if (in != 0) refuse(field, "must have no node of " + parts[in - 1u].field, got());
      if (!labelled.empty() && labelled[static_cast<size_t>(members[i])] == 0) refuse(field, "must have nodes with a label only", got());
      in = static_cast<uint8_t>(p + 1);
    }
  }
  for (Part& part : parts) std::sort(part.nodes.begin(), part.nodes.end());
  return {std::move(parts[0].nodes), std::move(parts[1].nodes), std::move(parts[2].nodes)};
}

std::vector<uint8_t> set_labels(GraphData& data, std::span<const int64_t> labels, const std::string& field) {
  check_range(labels, -1, data.nodes - 1, field);
  data.task = Task::single_label;
  data.labels.assign(labels.begin(), labels.end());
  data.classes = *std::max_element(labels.begin(), labels.end()) + 1;
  std::vector<uint8_t> labelled;
  for (const int64_t label : labels) labelled.push_back(label >= 0 ? 1 : 0);
  return labelled;
}

}  // namespace satchel
