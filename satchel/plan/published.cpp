// The byte model of the published tables (docs/theory.md 11). It counts what the papers' programs keep, so it is not plan_graph():
// blocks may be cut anywhere (4·values/G bytes of metadata, no padding), projections are stored, statistics are not counted.
#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "satchel/core/error.h"
#include "satchel/core/layout.h"
#include "satchel/plan/graph_plan.h"

namespace satchel {
namespace {

constexpr int kBits = 2, kRatio = 8;
constexpr int64_t kLongestBlock = 1024;  // of a norm's input

struct Figure {
  const char* name;
  int64_t rows;  // of a block; 0: nothing is compressed
  double mib;
};

// Of the block-wise paper.
constexpr std::array<Figure, 8> kArxiv = {{{"FP32", 0, 786.22},
                                           {"EXACT", 1, 30.47},
                                           {"G/R 2", 2, 27.89},
                                           {"G/R 4", 4, 26.60},
                                           {"G/R 8", 8, 25.95},
                                           {"G/R 16", 16, 25.72},
                                           {"G/R 32", 32, 25.60},
                                           {"G/R 64", 64, 25.56}}};
// Whole MiB. The model gives them with ⌈100/8⌉ = 13 projected features and without the labels' 1.50 MiB.
constexpr std::array<Figure, 3> kProducts = {{{"FP32", 0, 16480}, {"EXACT", 1, 445}, {"G/R 64", 64, 390}}};

struct Table {
  PublishedModel model;
  bool labels;
  std::span<const Figure> figures;
};

Table table_of(const std::string& name) {
  GraphShape shape;
  shape.conv = "sage";
  if (name == "arxiv") {
    shape.features = 128;
    shape.classes = 40;
    return {{shape, 169343, 90941}, true, kArxiv};
  }
  if (name == "products") {
    shape.features = 100;
    shape.hidden = 256;
    shape.classes = 47;
    shape.norm = Norm::none;
    return {{shape, 2449029, 196615}, false, kProducts};
  }
  fail("plan", "a published table must be arxiv or products", "'" + name + "'");
}

/// What one row of the table counts, layer by layer.
class Model {
 public:
  Model(const GraphShape& shape, int64_t nodes, int64_t training_nodes, int64_t rows) : shape_(shape), nodes_(nodes), rows_(rows) {
    if (rows == 0) {
      add_plain();
    } else {
      add_compressed();
    }
    if (training_nodes > 0) add("labels", "labels", {training_nodes}, 64, 8 * training_nodes);
  }
  std::vector<SavedTensor> parts;

 private:
  void add_plain() {
    parts = plan_graph(shape_, nodes_, parse_method("fp32"));
    std::erase_if(parts, [](const SavedTensor& s) { return s.kind == "statistics"; });
  }

  void add_compressed() {
    const int64_t hidden = shape_.hidden;
    for (int64_t i = 0; i < shape_.layers; ++i) {
      const std::string conv = "convs." + std::to_string(i), chain = "norms." + std::to_string(i);
      const int64_t width = i == 0 ? shape_.features : hidden, projected = ceil_div(width, kRatio);
      for (const char* kind : {"input", "aggregate"}) {
        add_codes(conv, kind, width, projected, rows_ * projected);
        add(conv, "projection", {width, projected}, 32, 4 * width * projected);
      }
      if (i + 1 == shape_.layers) break;
      if (shape_.norm != Norm::none) add_codes(chain, "norm", hidden, hidden, std::min(rows_ * hidden, kLongestBlock));
      for (const char* kind : {"mask", "dropout"}) add(chain, kind, {nodes_, hidden}, 1, ceil_div(nodes_ * hidden, 8));
    }
  }

  /// Rows of `width` values, of which `coded` are left after a projection.
  void add_codes(const std::string& name, const char* kind, int64_t width, int64_t coded, int64_t block) {
    const int64_t values = nodes_ * coded;
    const double blocks = static_cast<double>(values) / static_cast<double>(block);
    add(name, kind, {nodes_, width}, kBits, ceil_div(values * kBits, 8));
    add(name, "metadata", {std::llround(std::ceil(blocks)), 2}, 16, std::llround(4 * blocks));
  }

  void add(const std::string& name, const char* kind, std::vector<int64_t> shape, int bits, int64_t bytes) {
    int64_t values = 1;
    for (const int64_t size : shape) values *= size;
    const int64_t fp32_bytes = bits == 1 ? values : bits == kBits ? 4 * values : bytes;
    parts.push_back({name, kind, std::move(shape), bits, bytes, fp32_bytes});
  }

  const GraphShape shape_;
  const int64_t nodes_, rows_;
};

}  // namespace

std::vector<SavedTensor> paper_saves(const GraphShape& shape, int64_t nodes, int64_t training_nodes, int64_t rows) {
  if (shape.conv != "sage") fail("plan", "the papers' byte model must be of sage", shape.conv);
  if (rows < 0) fail("plan", "blocks must have 0 rows or more", rows);
  return Model(shape, nodes, training_nodes, rows).parts;
}

PublishedModel published_model(const std::string& name) { return table_of(name).model; }

std::vector<PublishedRow> published_table(const std::string& name) {
  const Table table = table_of(name);
  std::vector<PublishedRow> rows;
  for (const Figure& figure : table.figures) {
    const std::string method = figure.rows == 0   ? "fp32"
                               : figure.rows == 1 ? "exact"
                                                  : "blockwise,block=" + std::to_string(figure.rows) + "rows";
    const PublishedModel& m = table.model;
    rows.push_back({figure.name, figure.mib, paper_saves(m.shape, m.nodes, table.labels ? m.training_nodes : 0, figure.rows), method});
  }
  return rows;
}

}  // namespace satchel
