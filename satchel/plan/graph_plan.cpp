#include "satchel/plan/graph_plan.h"

#include <algorithm>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/plan/sample_bits.h"
#include "satchel/tensor/plan.h"

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
    const bool sage = shape_.conv == Conv::sage;
    if (method_.plain) {
      if (sage && (i > 0 || dense_)) add_float("aggregate");
      if (i > 0) add_float("input");
      return;
    }
    const bool data = i == 0;
    if (data ? !(method_.packs_data && dense_) : method_.shared && !chain_is_empty()) return;
    add_input("input");
    if (sage && !method_.shared && method_.keeps_aggregate) add_input("aggregate");
  }

  void add_chain() {
    if (method_.plain) return add_plain_chain();
    if (!method_.shared || chain_is_empty()) return add_layers();
    return shape_.activation == Activation::elu ? add_shared_elu() : add_shared();
  }

  void add_plain_chain() {
    const Activation activation = shape_.activation;
    if (shape_.norm != Norm::none) add_float("norm");
    add_statistics(2);
    // Without dropout the result of ReLU is the next layer's input; LeakyReLU and ELU keep what they read.
    const bool own = activation != Activation::relu || shape_.dropout > 0;
    if (activation != Activation::none && own) add_float("activation");
    if (shape_.dropout > 0) add("dropout", {nodes_, width_}, 8, values(), values());
  }

  /// Norm, activation and dropout each by itself.
  void add_layers() {
    if (shape_.norm != Norm::none) add_packed("norm", norm_spec(method_, width_, count()), 0);
    add_statistics(codes_normalised_rows(method_) ? 1 : 2);
    if (shape_.activation == Activation::elu) add_elu("activation");
    if (shape_.activation == Activation::relu || shape_.activation == Activation::leaky_relu) add_mask("mask");
    if (shape_.dropout > 0 && method_.keeps_dropout) return add_mask("dropout");
    add_dropout_seed();
  }

  void add_shared() {
    const CodecSpec spec = shared_spec(method_, shape_.norm, shape_.activation, width_, count());
    const bool threshold = spec.side == Side::one_sided || spec.side == Side::both, normed = shape_.norm != Norm::none;
    add_packed("shared", spec, !threshold ? 0 : normed ? width_ : 1);
    if (spec.side == Side::none && shape_.activation != Activation::none) add_mask("mask");
    if (spec.side == Side::none && normed) add("affine", {2, width_}, 32, 8 * width_, 8 * width_);
    add_statistics(1);
    add_dropout_seed();
  }

  void add_shared_elu() {
    if (shape_.norm != Norm::none) add_packed("norm", norm_spec(method_, width_, count()), 0);
    add_statistics(1);
    add_elu("shared");
    add_dropout_seed();
  }

  void add_elu(const char* kind) {
    const CodecSpec spec = shared_spec(method_, Norm::none, Activation::elu, width_, 0);
    add_packed(kind, spec, spec.side == Side::both ? 1 : 0);
    if (spec.side == Side::none) add_mask("mask");
  }

  /// `numbers` a channel (BatchNorm) or a row (LayerNorm).
  void add_statistics(int64_t numbers) {
    if (shape_.norm == Norm::none) return;
    const int64_t count = shape_.norm == Norm::batch ? width_ : nodes_, bytes = 4 * numbers * count;
    add("statistics", numbers == 1 ? std::vector<int64_t>{count} : std::vector<int64_t>{numbers, count}, 32, bytes, bytes);
  }

  /// Inputs of layers, whose rows may have bits of their own; a norm's rows never have.
  void add_input(const char* kind) {
    if (has_sample_bits(method_, method_.input)) {
      const std::vector<int64_t> shape = {nodes_, width_};
      return add(kind, shape, method_.input.bits, bytes_by_sample(shape, method_.input, kOp), 4 * values());
    }
    add_packed(kind, method_.input, 0);
    if (std::holds_alternative<RandomProjection>(method_.input.transform)) add_seed();
  }

  void add_packed(const char* kind, const CodecSpec& spec, int64_t channels) {
    const std::vector<int64_t> shape = {nodes_, width_};
    add(kind, shape, spec.bits, plan_of(shape, DType::f32, spec, channels, 1, kOp).at.total, 4 * values());
  }

  void add_dropout_seed() {
    if (shape_.dropout > 0) add_seed();
  }

  void add_float(const char* kind) { add(kind, {nodes_, width_}, 32, 4 * values(), 4 * values()); }
  void add_mask(const char* kind) { add(kind, {nodes_, width_}, 1, ceil_div(values(), 8), values()); }
  void add_seed() { add("seed", {1}, 64, 8, 8); }

  void add(const char* kind, std::vector<int64_t> shape, int bits, int64_t bytes, int64_t fp32_bytes) {
    total_ += std::max(bytes, fp32_bytes);  // each below 2^60
    if (total_ > kMostBytes) fail(kOp, "a model may keep at most 2^62 bytes; too many layers", shape_.layers);
    lines_.push_back({name_, kind, std::move(shape), bits, bytes, fp32_bytes});
  }

  bool chain_is_empty() const { return shape_.norm == Norm::none && shape_.activation == Activation::none; }
  /// Values that share a mean and a deviation.
  int64_t count() const { return shape_.norm == Norm::batch ? nodes_ : width_; }
  int64_t values() const { return count_of(std::vector<int64_t>{nodes_, width_}, kOp); }

  const GraphShape& shape_;
  const int64_t nodes_;
  const Method& method_;
  const bool dense_;
  std::string name_;
  int64_t width_ = 0, total_ = 0;
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
  const std::vector<int64_t> logits = {method.plain ? training_nodes : nodes, shape.classes};
  // torch keeps the sum of the weights of the classes too.
  const int64_t bytes = 4 * count_of(logits, kOp) + (method.plain ? 4 : 0);
  return {{"loss", "loss", logits, 32, bytes, bytes}};
}

}  // namespace satchel
