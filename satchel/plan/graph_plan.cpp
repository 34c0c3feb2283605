#include "satchel/plan/graph_plan.h"

#include <algorithm>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/plan/kept_line.h"
#include "satchel/tensor/codec_layout.h"

namespace satchel {
namespace {

constexpr const char* kOp = "plan";
constexpr int64_t kMostLayers = 1000, kMostWidth = int64_t{1} << 31, kMostNodes = int64_t{1} << 40, kMostBytes = int64_t{1} << 62;

void check_within(const char* what, int64_t value, int64_t most, const char* most_text) {
  if (value < 1 || value > most) fail(kOp, std::string(what) + " must be 1 to " + most_text, value);
}

void check_sizes(const GraphShape& shape, int64_t nodes) {
  if (shape.conv > Conv::sage) fail(kOp, "conv must be gcn or sage", int(shape.conv));
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
    for (int64_t i = 0; i < shape_.layers; ++i) {
      name_ = "convs." + std::to_string(i);
      width_ = i == 0 ? shape_.features : shape_.hidden;
      add_conv(i);
      if (i + 1 == shape_.layers) break;
      name_ = "norms." + std::to_string(i);
      width_ = shape_.hidden;
      add_chain();
    }
    return std::move(lines_);
  }

 private:
  void add_conv(int64_t i) {
    const bool sage = shape_.conv == Conv::sage, data = i == 0;
    if (is_baseline(method_)) {
      if (sage && (!data || dense_)) add_float("aggregate");
      if (!data) add_float("input");
      return;
    }
    const std::vector<Keep> input = keeps_of(method_, {data ? Role::data : Role::weight_input});
    if ((data && !dense_) || input.empty() || find(before_, Kind::shared) != nullptr) return;
    add(input);
    if (sage) add(keeps_of(method_, {Role::aggregate}));
  }

  void add_chain() {
    if (is_baseline(method_)) return add_baseline_chain();
    Site site;
    site.norm = shape_.norm;
    site.activation = shape_.activation;
    site.drops = shape_.dropout > 0;
    site.width = width_;
    site.count = shape_.norm == Norm::batch ? nodes_ : width_;
    before_ = keeps_of(method_, site);
    add(before_);
  }

  void add_baseline_chain() {
    const Activation activation = shape_.activation;
    if (shape_.norm != Norm::none) {
      add_float("norm");
      Keep statistics{Kind::statistics};
      statistics.numbers = 2;
      add(statistics);
    }
    // Without dropout the result of ReLU is the next layer's input; LeakyReLU and ELU keep what they read.
    const bool own = activation != Activation::relu || shape_.dropout > 0;
    if (activation != Activation::none && own) add_float("activation");
    if (shape_.dropout > 0) add({name_, "dropout", rows(), 8, values(), values()});
  }

  void add_float(const char* kind) { add({name_, kind, rows(), 32, 4 * values(), 4 * values()}); }

  void add(const std::vector<Keep>& keeps) {
    for (const Keep& keep : keeps) add(keep);
  }
  void add(const Keep& keep) { add(kept_line(name_, keep, {rows(), rows(), shape_.norm == Norm::batch ? width_ : nodes_})); }

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
  std::string name_;
  int64_t width_ = 0, total_ = 0;
  std::vector<Keep> before_;  // what the layers before the next convolution keep
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
