// OGB raw node-property folders: raw/{num-node-list,num-edge-list,edge,node-feat}.csv.gz without header lines; where it has weights,
// raw/edge_weight.csv.gz or raw/edge-feat.csv.gz of one column; where it has labels, raw/node-label.csv.gz and
// split/<name>/{train,valid,test}.csv.gz.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "satchel/core/number.h"
#include "satchel/data/graph_layouts.h"
#include "satchel/data/gzip.h"
#include "satchel/data/printable.h"

namespace satchel {
namespace {

/// Cells of one line at a time, with the place of each for errors.
class CsvReader {
 public:
  explicit CsvReader(const std::string& path) : lines_(path) {}

  /// The next line; blank ones may only stand at the end.
  bool next_line() {
    std::string_view line;
    if (!lines_.next(line)) return false;
    if (!line.empty()) {
      rest_ = line;
      more_ = true;
      column_ = 0;
      return true;
    }
    while (lines_.next(line)) {
      if (!line.empty()) refuse(lines_.field(), "must not stand after a blank line", printable(line));
    }
    return false;
  }
  bool next_cell() {
    if (!more_) return false;
    const size_t comma = rest_.find(',');
    more_ = comma != std::string_view::npos;
    cell_ = rest_.substr(0, comma);
    rest_ = more_ ? rest_.substr(comma + 1) : std::string_view();
    ++column_;
    return true;
  }
  bool empty() const { return cell_.empty() || cell_ == "\"\""; }  // how pandas writes a missing number

  template <class Number>
  Number number(const char* rule) const {
    Number value{};
    const auto [end, error] = std::from_chars(cell_.data(), cell_.data() + cell_.size(), value);
    if (error != std::errc() || end != cell_.data() + cell_.size()) stop(rule);
    return value;
  }
  int64_t index(int64_t high) const {
    const auto value = number<int64_t>("must be a whole number");
    if (value < 0 || value > high) stop("must be 0 to " + std::to_string(high));
    return value;
  }
  float finite() const {
    const auto wide = number<double>("must be a number");
    if (!(std::fabs(wide) <= 3.4028234663852886e38)) stop("must be a finite number of 32 bits");
    return static_cast<float>(wide);
  }
  bool more() const { return more_; }
  [[noreturn]] void stop(const std::string& rule) const { refuse(place(), rule, cell_.empty() ? "nothing" : printable(cell_)); }
  std::string place() const { return lines_.field() + ", column " + std::to_string(column_); }
  const std::string& path() const { return lines_.path(); }

  /// A line has so many cells, no more and no fewer.
  void expect_cell(int64_t columns) {
    if (!next_cell()) refuse(lines_.field(), "must have " + std::to_string(columns) + " columns", std::to_string(column_));
  }
  void expect_line_end(int64_t columns) {
    if (more_) refuse(lines_.field(), "must have " + std::to_string(columns) + " columns", "more");
  }
  int64_t line() const { return lines_.number(); }

 private:
  GzipLines lines_;
  std::string_view rest_, cell_;
  int64_t column_ = 0;
  bool more_ = false;
};

/// row(i) reads the cells of line i; there are exactly `count` lines.
template <class Row>
void read_rows(CsvReader& csv, int64_t count, const char* what, const Row& row) {
  const std::string rule = "must have " + std::to_string(count) + " lines, one " + what;
  int64_t i = 0;
  for (; csv.next_line(); ++i) {
    if (i == count) refuse(csv.path(), rule, "more");
    row(i);
  }
  if (i < count) refuse(csv.path(), rule, std::to_string(i));
}

int64_t read_count(const std::string& path, int64_t low, int64_t high) {
  CsvReader csv(path);
  int64_t count = 0;
  read_rows(csv, 1, "graph", [&](int64_t) {
    csv.expect_cell(1);
    count = csv.index(high);
    if (count < low) csv.stop("must be at least " + std::to_string(low));
    csv.expect_line_end(1);
  });
  return count;
}

/// One number a line.
std::vector<float> read_weights(const std::string& path, int64_t edges) {
  CsvReader csv(path);
  std::vector<float> weight;
  read_rows(csv, edges, "edge", [&](int64_t) {
    csv.expect_cell(1);
    weight.push_back(csv.finite());
    if (csv.more()) {
      refuse(csv.path(), "must have one column, the edge's weight (--unweighted takes edges without weights and features)", "more");
    }
  });
  return checked_weights(std::move(weight), path);
}

void read_edges(const std::string& raw, GraphData& data, EdgeWeights weights) {
  const int64_t edges = read_count(raw + "num-edge-list.csv.gz", 0, INT64_MAX / 16);
  CsvReader csv(raw + "edge.csv.gz");
  std::vector<int32_t> pairs;
  read_rows(csv, edges, "edge", [&](int64_t) {
    for (int end = 0; end < 2; ++end) {
      csv.expect_cell(2);
      pairs.push_back(static_cast<int32_t>(csv.index(data.nodes - 1)));
    }
    csv.expect_line_end(2);
  });
  std::vector<float> weight;
  const std::string own = raw + "edge_weight.csv.gz", features = raw + "edge-feat.csv.gz";
  if (weights == EdgeWeights::use) {
    if (exists(own) && exists(features)) refuse(features, "must not stand beside edge_weight.csv.gz", "both");
    if (exists(own) || exists(features)) weight = read_weights(exists(own) ? own : features, edges);
  }
  set_edges(data, pairs, std::move(weight));
}

void read_features(const std::string& raw, GraphData& data) {
  CsvReader csv(raw + "node-feat.csv.gz");
  Features& out = data.features;
  const auto cell = [&] { out.dense.push_back(csv.finite()); };
  read_rows(csv, data.nodes, "node", [&](int64_t i) {
    if (i == 0) {
      while (csv.next_cell()) cell();
      out.columns = static_cast<int64_t>(out.dense.size());
      check_memory(static_cast<uint64_t>(data.nodes) * out.dense.size() * sizeof(float), csv.path());
      out.dense.reserve(static_cast<size_t>(data.nodes) * out.dense.size());
      return;
    }
    for (int64_t c = 0; c < out.columns; ++c) {
      csv.expect_cell(out.columns);
      cell();
    }
    csv.expect_line_end(out.columns);
  });
  out.rows = data.nodes;
}

constexpr int64_t kMissing = -1;

/// A label cell: a whole number, also written 3.0; nothing or NaN is a missing one.
int64_t label_of(const CsvReader& csv, int64_t high) {
  if (csv.empty()) return kMissing;
  const auto value = csv.number<double>("must be a class id");
  if (std::isnan(value)) return kMissing;
  if (!(value >= 0 && value <= static_cast<double>(high))) csv.stop("must be 0 to " + std::to_string(high));
  if (value != std::floor(value)) csv.stop("must be a whole number");
  return static_cast<int64_t>(value);
}

/// One column: class ids. More: 0 or 1 for each label. Returns which nodes have all theirs.
std::vector<uint8_t> read_labels(const std::string& raw, GraphData& data) {
  CsvReader csv(raw + "node-label.csv.gz");
  std::vector<uint8_t> labelled(static_cast<size_t>(data.nodes), 1);
  std::vector<int64_t> row;
  int64_t columns = 0;
  read_rows(csv, data.nodes, "node", [&](int64_t i) {
    row.clear();
    // Whether a first cell is a class id or a 0 or 1 shows when the line has ended.
    while (csv.next_cell()) row.push_back(label_of(csv, columns > 1 ? 1 : data.nodes - 1));
    const auto here = static_cast<int64_t>(row.size());
    if (i == 0) columns = here;
    if (here != columns) {
      refuse(csv.path() + ": line " + std::to_string(csv.line()), "must have " + std::to_string(columns) + " columns",
             std::to_string(here));
    }
    for (const int64_t label : row) {
      if (label == kMissing) labelled[static_cast<size_t>(i)] = 0;
      if (columns == 1) data.labels.push_back(static_cast<int32_t>(label));
      if (columns == 1) data.classes = std::max(data.classes, label + 1);
      if (columns > 1 && label > 1) refuse(csv.path() + ": line 1", "must be 0 or 1 for each label", std::to_string(label));
      if (columns > 1) data.targets.push_back(label == 1 ? 1 : 0);
    }
  });
  if (columns > 1) {
    data.task = Task::multi_label;
    data.classes = columns;
  }
  return labelled;
}

Part read_part(const std::string& path, int64_t nodes) {
  CsvReader csv(path);
  Part part{path, {}};
  while (csv.next_line()) {
    csv.expect_cell(1);
    part.nodes.push_back(csv.index(nodes - 1));
    csv.expect_line_end(1);
    if (static_cast<int64_t>(part.nodes.size()) > nodes) refuse(path, "must name a node once", "more lines than nodes");
  }
  return part;
}

}  // namespace

GraphData load_ogb(const std::string& folder, EdgeWeights weights) {
  const std::string raw = folder + "/raw/", split = folder + "/split";
  GraphData data;
  data.nodes = read_count(raw + "num-node-list.csv.gz", 1, kMaxNodes);
  const bool unlabelled = !exists(raw + "node-label.csv.gz") && !exists(split);
  const std::vector<uint8_t> labelled = unlabelled ? std::vector<uint8_t>() : read_labels(raw, data);
  read_features(raw, data);
  read_edges(raw, data, weights);
  if (unlabelled) return data;
  if (!is_folder(split)) fail("load", "folder must exist", split);
  std::vector<std::string> ways;
  for (const std::string& name : names_in(split)) {
    if (is_folder(split + "/" + name)) ways.push_back(name);
  }
  if (ways.size() != 1) refuse(split, "must hold one folder", listed(ways));
  const std::string chosen = split + "/" + ways[0] + "/";
  data.splits.push_back(checked_split({read_part(chosen + "train.csv.gz", data.nodes), read_part(chosen + "valid.csv.gz", data.nodes),
                                       read_part(chosen + "test.csv.gz", data.nodes)},
                                      data.nodes, labelled));
  return data;
}

}  // namespace satchel
