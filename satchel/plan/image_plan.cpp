#include "satchel/plan/image_plan.h"

#include <algorithm>
#include <bit>
#include <set>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/mixed.h"
#include "satchel/tensor/plan.h"

namespace satchel {
namespace {

constexpr const char* kOp = "plan";
constexpr int64_t kMostImages = 1 << 20, kMostBytes = int64_t{1} << 62;
constexpr int64_t kWeightCopies = 3;                   // weight, gradient, momentum
constexpr int64_t kDecodedBytes = int64_t{256} << 20;  // of a layer's input at a time (autograd room, CUDA)

/// The lines of a model, layer by layer in the order of the forward pass.
class Lines {
 public:
  Lines(const ImageLayers& model, int64_t images, const Method& method) : model_(model), images_(images), method_(method) {
    for (const ImageLayer& layer : model.layers) {
      if (has_weight(layer)) weighed_.insert(layer.inputs[0]);
    }
  }

  std::vector<SavedTensor> make() {
    for (const ImageLayer& layer : model_.layers) {
      layer_ = &layer;
      in_ = layer.inputs[0];
      out_ = layer.output;
      if (method_.plain) {
        add_plain();
      } else if (method_.shared) {
        add_shared();
      } else {
        add_by_layer();
      }
      after_.push_back(kept_bytes_);
    }
    return std::move(lines_);
  }

  /// What the layers up to each have kept.
  const std::vector<int64_t>& after() const { return after_; }

 private:
  static bool has_weight(const ImageLayer& layer) { return layer.kind == LayerKind::conv || layer.kind == LayerKind::linear; }

  /// torch's functions: each map once, whoever keeps it.
  void add_plain() {
    using enum LayerKind;
    switch (layer_->kind) {
      case conv:
      case linear: return add_float_once("input", in_);
      case norm:
        add_float_once("norm", in_);
        add_statistics(2);
        return add_plain_relu();
      case relu: return add_plain_relu();
      case dropout: return add("dropout", shape_of(out_), 8, values(out_), values(out_));
      case max_pool: add_float_once("input", in_); return add("indices", shape_of(out_), 64, 8 * values(out_), 8 * values(out_));
      case average_pool:
        // A mean over the whole map, as torch averages to 1×1, keeps nothing.
        if (map_of(out_).row && map_of(out_).channels == map_of(in_).channels) return;
        return add_float_once("input", in_);
      case concat: return;
    }
  }

  /// A ReLU keeps its result, which stands in the next layer's line where a weight reads it.
  void add_plain_relu() {
    if (!layer_->relu) return;
    if (layer_->dropout || !weighed_.contains(out_)) add_float_once("activation", layer_->dropout ? -1 : out_);
    if (layer_->dropout) add("dropout", shape_of(out_), 8, values(out_), values(out_));
  }

  /// Each function by itself: inputs once for all convolutions that read them, norm inputs, masks, offsets.
  void add_by_layer() {
    using enum LayerKind;
    switch (layer_->kind) {
      case conv:
      case linear: return add_input();
      case norm:
        add_packed("norm", norm_spec(method_, map_of(in_).channels), shape_of(in_));
        add_statistics(2);
        return layer_->relu ? add_mask("mask") : void();
      case relu: add_mask("mask"); return layer_->dropout ? add_dropout() : void();
      case dropout: return add_dropout();
      case max_pool: return add_offsets();
      case average_pool:
      case concat: return;
    }
  }

  /// One save for a norm, its ReLU and the layers that read it; a sum's ReLU form beside its norm.
  void add_shared() {
    using enum LayerKind;
    switch (layer_->kind) {
      case conv:
      case linear: return made_by_sharing_.contains(in_) ? void() : add_input();
      case norm: return layer_->inputs.size() == 1 && layer_->relu ? add_shared_norm() : add_shared_sum();
      case relu: add_relu_form(); return layer_->dropout ? add_seed() : void();
      case dropout: return method_.keeps_dropout ? add_mask("dropout") : add_seed();
      case max_pool:
        add_offsets();
        // Packed when the first convolution asks for it.
        return made_by_sharing_.contains(in_) && weighed_.contains(out_) ? add_relu_form() : void();
      case average_pool:
      case concat: return;
    }
  }

  /// norm → ReLU.
  void add_shared_norm() {
    const int64_t channels = map_of(in_).channels;
    const CodecSpec spec = shared_spec(method_, Norm::batch, Activation::relu, channels);
    add_packed("shared", spec, rows_of(in_), spec.side == Side::none ? 0 : channels);
    if (spec.side == Side::none) {
      add_row_mask();
      add("affine", {2, channels}, 32, 8 * channels, 8 * channels);
    }
    add_statistics(1);
    made_by_sharing_.insert(out_);
  }

  /// norm, or ReLU(norm + skip): the norm's values that nobody else reads, and the sum's.
  void add_shared_sum() {
    add_packed("norm", norm_spec(method_, map_of(in_).channels), rows_of(in_));
    add_statistics(1);
    if (layer_->relu) add_relu_form();
  }

  void add_relu_form() {
    const CodecSpec spec = shared_spec(method_, Norm::none, Activation::relu, map_of(out_).channels);
    add_packed("shared", spec, rows_of(out_));
    if (spec.side == Side::none) add_row_mask();
    made_by_sharing_.insert(out_);
  }

  void add_input() {
    if (!kept_.insert(in_).second) return;
    add_packed("input", method_.input, shape_of(in_));
    if (std::holds_alternative<RandomProjection>(method_.input.transform)) add_seed();
  }

  void add_packed(const char* kind, const CodecSpec& spec, const std::vector<int64_t>& coded, int64_t channels = 0) {
    int64_t bytes = plan_of(coded, DType::f32, spec, channels, 1, kOp).at.total;
    if (method_.adaptive && spec.bits <= kMostMixed) {
      bytes = MixedCode{images_, count_of(coded, kOp) / images_, spec.block, mixed_budget(images_, spec.bits), spec.header}.total();
    }
    add(kind, coded, spec.bits, bytes, 4 * count_of(coded, kOp));
  }

  /// Where in its window each value of a pool came from, in as few bits as the window needs.
  void add_offsets() {
    const int bits = std::bit_width(static_cast<uint64_t>(layer_->window * layer_->window - 1));
    add("offsets", shape_of(out_), bits, code_bytes(values(out_), bits), 8 * values(out_));
  }

  void add_dropout() { return method_.keeps_dropout ? add_mask("dropout") : add_seed(); }

  void add_float_once(const char* kind, int map) {
    if (map >= 0 && !kept_.insert(map).second) return;
    const int of = map < 0 ? out_ : map;
    add(kind, shape_of(of), 32, 4 * values(of), 4 * values(of));
  }

  void add_mask(const char* kind) { add(kind, shape_of(out_), 1, ceil_div(values(out_), 8), values(out_)); }
  void add_row_mask() { add("mask", rows_of(out_), 1, ceil_div(values(out_), 8), values(out_)); }
  void add_seed() { add("seed", {1}, 64, 8, 8); }

  /// `numbers` a channel.
  void add_statistics(int64_t numbers) {
    const int64_t count = map_of(in_).channels, bytes = 4 * numbers * count;
    add("statistics", numbers == 1 ? std::vector<int64_t>{count} : std::vector<int64_t>{numbers, count}, 32, bytes, bytes);
  }

  void add(const char* kind, std::vector<int64_t> shape, int bits, int64_t bytes, int64_t fp32_bytes) {
    total_ += std::max(bytes, fp32_bytes);  // each below 2^60
    if (total_ > kMostBytes) fail(kOp, "a model may keep at most 2^62 bytes; too many images", images_);
    kept_bytes_ += bytes;
    lines_.push_back({layer_->name, kind, std::move(shape), bits, bytes, fp32_bytes});
  }

  const ImageMap& map_of(int map) const { return model_.maps[static_cast<size_t>(map)]; }
  std::vector<int64_t> shape_of(int map) const {
    const ImageMap& m = map_of(map);
    return m.row ? std::vector<int64_t>{images_, m.channels} : std::vector<int64_t>{images_, m.channels, m.height, m.width};
  }
  /// A map as rows of channels, which is how a shared save codes it.
  std::vector<int64_t> rows_of(int map) const {
    const ImageMap& m = map_of(map);
    return {images_ * m.height * m.width, m.channels};
  }
  int64_t values(int map) const { return count_of(shape_of(map), kOp); }

  const ImageLayers& model_;
  const int64_t images_;
  const Method& method_;
  const ImageLayer* layer_ = nullptr;
  int in_ = 0, out_ = 0;
  std::set<int> weighed_;          // maps that a convolution or a linear layer reads
  std::set<int> kept_;             // maps with a line
  std::set<int> made_by_sharing_;  // maps that their readers rebuild from a shared save
  int64_t total_ = 0, kept_bytes_ = 0;
  std::vector<SavedTensor> lines_;
  std::vector<int64_t> after_;
};

void check(const BatchShape& batch, const Method& method) {
  if (batch.images < 1 || batch.images > kMostImages) fail(kOp, "images must be 1 to 2^20", batch.images);
  validate(method, kOp);
}

/// The values of one image that stand between layers while each runs: made and still to be read, its own output among them. In
/// backward their gradients do. The images themselves are not counted. A norm and its ReLU as one function (shared methods) work in the
/// memory of what they read.
std::vector<int64_t> alive_values(const ImageLayers& model, bool shared) {
  std::vector<size_t> last(model.maps.size(), 0);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    for (const int map : model.layers[i].inputs) last[static_cast<size_t>(map)] = i;
  }
  std::vector<int64_t> during;
  std::vector<bool> ended(model.maps.size(), false);
  int64_t alive = 0;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const ImageLayer& layer = model.layers[i];
    alive += model.maps[static_cast<size_t>(layer.output)].values();
    const bool lent = shared && layer.kind == LayerKind::norm && layer.relu;
    during.push_back(alive - (lent ? model.maps[static_cast<size_t>(layer.inputs[0])].values() : 0));
    for (const int map : layer.inputs) {
      const auto m = static_cast<size_t>(map);
      if (map == 0 || last[m] != i || ended[m]) continue;
      ended[m] = true;
      alive -= model.maps[m].values();
    }
  }
  return during;
}

/// What a layer's backward decodes at a time.
int64_t decoded_bytes(const ImageLayers& model, const ImageLayer& layer, int64_t images, const Method& method) {
  if (method.plain) return 0;
  return std::min(kDecodedBytes, 4 * images * model.maps[static_cast<size_t>(layer.inputs[0])].values());
}

}  // namespace

std::vector<SavedTensor> plan_image(const ImageShape& shape, const BatchShape& batch, const Method& method) {
  check(batch, method);
  return Lines(layers_of(shape, batch.height, batch.width), batch.images, method).make();
}

ImageMemory memory_of(const ImageShape& shape, const BatchShape& batch, const Method& method) {
  check(batch, method);
  const ImageLayers model = layers_of(shape, batch.height, batch.width);
  Lines lines(model, batch.images, method);
  ImageMemory memory;
  memory.saved = total_bytes(lines.make());
  for (const ImageLayer& layer : model.layers) memory.parameters += 4 * kWeightCopies * layer.parameters;
  if (!method.plain) memory.images = 4 * batch.images * model.maps[0].values();
  const std::vector<int64_t> alive = alive_values(model, method.shared);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const int64_t maps = 4 * batch.images * alive[i] + decoded_bytes(model, model.layers[i], batch.images, method);
    memory.fullest = std::max(memory.fullest, lines.after()[i] + maps);
  }
  return memory;
}

int64_t largest_batch(const ImageShape& shape, int64_t height, int64_t width, const Method& method, int64_t budget) {
  if (budget < 1) fail(kOp, "a budget must be 1 byte or more", budget);
  const auto fits = [&](int64_t images) { return memory_of(shape, {images, height, width}, method).total() <= budget; };
  if (!fits(1)) return 0;
  int64_t most = 1, least_not = 2;
  while (least_not <= kMostImages && fits(least_not)) {
    most = least_not;
    least_not *= 2;
  }
  least_not = std::min(least_not, kMostImages + 1);
  while (least_not - most > 1) {
    const int64_t middle = most + (least_not - most) / 2;
    (fits(middle) ? most : least_not) = middle;
  }
  return most;
}

}  // namespace satchel
