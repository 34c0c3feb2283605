#include "satchel/plan/graph_plan.h"

#include <algorithm>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/graph_layer.h"
#include "satchel/kernels/codec_layout.h"
#include "satchel/plan/kept_line.h"

namespace satchel {
namespace {

constexpr const char* kOp = "plan";
constexpr int64_t kMostLayers = 1000, kMostWidth = int64_t{1} << 31, kMostNodes = int64_t{1} << 40, kMostBytes = int64_t{1} << 62;

void check_within(const char* what, int64_t value, int64_t most, const char* most_text) {
  if (value < 1 || value > most) fail(kOp, std::string(what) + " must be 1 to " + most_text, value);
}

void check_sizes(const GraphShape& shape, int64_t nodes) {
  graph_layer(shape.conv, kOp);
  if (shape.norm > Norm::layer) fail(kOp, "norm must be none, batch or layer", int(shape.norm));
  if (shape.activation > Activation::elu) fail(kOp, "activation must be none, relu, leaky_relu or elu", int(shape.activation));
  check_within("layers", shape.layers, kMostLayers, "1000");
  check_within("features", shape.features, kMostWidth, "2^31");
  check_within("hidden", shape.hidden, kMostWidth, "2^31");
  check_within("classes", shape.classes, kMostWidth, "2^31");
  check_within("nodes", nodes, kMostNodes, "2^40");
  if (!(shape.dropout >= 0 && shape.dropout < 1)) fail(kOp, "dropout must be at least 0 and less than 1", shape.dropout);
}

/// The lines of a model, layer by layer in the order of the forward pass.
class Lines {
 public:
  Lines(const GraphShape& shape, int64_t nodes, const Method& method, bool sparse_data)
      : shape_(shape), nodes_(nodes), method_(method), dense_(!sparse_data) {}

  std::vector<SavedTensor> make() {
    const std::vector<Place> places = all_places();
    for (auto place = places.begin(); place != places.end(); ++place) {
      const auto is_next = [](const Place& p) { return p.site.role == Role::weight_input || p.site.role == Role::epilogue; };
      const auto next = std::find_if(place + 1, places.end(), is_next);
      next_keeps_input_ = next != places.end() && next->site.role == Role::weight_input;
      name_ = place->name;
      width_ = place->site.width;
      norm_ = place->site.norm;
      is_baseline(method_) ? add_baseline(place->site) : add_packed(place->site);
      if (place->site.role == Role::epilogue) reads_data_ = false;
    }
    return std::move(lines_);
  }

 private:
  struct Place {
    std::string name;
    Site site;
  };

  std::vector<Place> all_places() const {
    const GraphLayer& layer = graph_layer(shape_.conv, kOp);
    std::vector<Place> places;
    for (int64_t i = 0; i < shape_.layers; ++i) {
      const bool last = i + 1 == shape_.layers;
      const LayerSites sites = layer.sites(i == 0 ? shape_.features : shape_.hidden, last ? shape_.classes : shape_.hidden);
      for (const LayerSite& s : is_baseline(method_) ? sites.torch : sites.packed)
        places.push_back({"convs." + std::to_string(i) + s.part, s.site});
      if (!last) places.push_back({"norms." + std::to_string(i), between_layers()});
    }
    return places;
  }

  Site between_layers() const {
    Site site;
    site.norm = shape_.norm;
    site.activation = shape_.activation;
    site.drops = shape_.dropout > 0;
    site.width = shape_.hidden;
    site.count = shape_.norm == Norm::batch ? nodes_ : shape_.hidden;
    return site;
  }

  void add_packed(const Site& site) {
    if (site.role == Role::weight_input) return add_input();
    const std::vector<Keep> keeps = keeps_of(method_, site);
    if (site.role != Role::aggregate || keeps_input_) add(keeps);
    if (site.role == Role::epilogue) before_ = keeps;
  }

  void add_input() {
    const std::vector<Keep> input = keeps_of(method_, {reads_data_ ? Role::data : Role::weight_input});
    keeps_input_ = !(reads_data_ && !dense_) && find(before_, Kind::shared) == nullptr && !input.empty();
    if (keeps_input_) add(input);
  }

  void add_baseline(const Site& site) {
    if (site.role == Role::weight_input && !reads_data_) add_float("input");
    if (site.role == Role::aggregate && (!reads_data_ || dense_)) add_float("aggregate");
    if (site.role == Role::epilogue) add_baseline_epilogue(site);
  }

  void add_baseline_epilogue(const Site& site) {
    if (site.norm != Norm::none) {
      add_float("norm");
      Keep statistics{Kind::statistics};
      statistics.numbers = 2;
      add(statistics);
    }
    // Without dropout the result of ReLU is the next layer's input, where that is kept; LeakyReLU and ELU keep what they read.
    const bool own = site.activation != Activation::relu || site.drops || !next_keeps_input_;
    if (site.activation != Activation::none && own) add_float("activation");
    if (site.drops) add({name_, "dropout", rows(), 8, values(), values()});
  }

  void add_float(const char* kind) { add({name_, kind, rows(), 32, 4 * values(), 4 * values()}); }

  void add(const std::vector<Keep>& keeps) {
    for (const Keep& keep : keeps) add(keep);
  }
  void add(const Keep& keep) { add(kept_line(name_, keep, {rows(), rows(), norm_ == Norm::batch ? width_ : nodes_})); }

  void add(SavedTensor line) {
    total_ += std::max(line.bytes, line.fp32_bytes);  // each below 2^60
    if (total_ > kMostBytes) fail(kOp, "a model may keep at most 2^62 bytes; too many layers", shape_.layers);
    lines_.push_back(std::move(line));
  }

  std::vector<int64_t> rows() const { return {nodes_, width_}; }
  int64_t values() const { return count_of(rows(), kOp); }

  const GraphShape& shape_;
  const int64_t nodes_;
  const Method& method_;
  const bool dense_;
  // Of the place at hand.
  std::string name_;
  int64_t width_ = 0;
  Norm norm_ = Norm::none;

  bool next_keeps_input_ = false;  // a weight_input comes next, aggregates aside
  bool reads_data_ = true;         // x is the data set: no epilogue has come yet
  bool keeps_input_ = false;       // the last weight_input keeps its own
  std::vector<Keep> before_;       // of the last epilogue
  int64_t total_ = 0;
  std::vector<SavedTensor> lines_;
};

}  // namespace

std::vector<SavedTensor> plan_graph(const GraphShape& shape, int64_t nodes, const Method& method, bool sparse_data) {
  check_sizes(shape, nodes);
  validate_for_graph(method, kOp);
  return Lines(shape, nodes, method, sparse_data).make();
}

std::vector<SavedTensor> plan_loss(const GraphShape& shape, int64_t nodes, int64_t training_nodes, const Method& method) {
  check_sizes(shape, nodes);
  if (training_nodes < 1 || training_nodes > nodes) fail(kOp, "training nodes must be 1 to the number of nodes", training_nodes);
  const std::vector<int64_t> logits = {is_baseline(method) ? training_nodes : nodes, shape.classes};
  // torch keeps the sum of the weights of the classes too.
  const int64_t bytes = 4 * count_of(logits, kOp) + (is_baseline(method) ? 4 : 0);
  return {{"loss", "loss", logits, 32, bytes, bytes}};
}

}  // namespace satchel
