#include "satchel/plan/image_plan.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <set>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/mixed.h"
#include "satchel/plan/image_flow.h"
#include "satchel/tensor/plan.h"

namespace satchel {
namespace {

constexpr const char* kOp = "plan";
constexpr int64_t kMostBytes = int64_t{1} << 62, kMostValues = int64_t{1} << 56;
constexpr int64_t kMostBudget = int64_t{1} << 55;      // twice as many images, at 1 bit a value, are within kMostBytes in float32
constexpr int64_t kWeightCopies = 3;                   // weight, gradient, momentum
constexpr int64_t kDecodedBytes = int64_t{256} << 20;  // of a layer's input at a time (autograd room, CUDA)
constexpr size_t kInFlight = 2;                        // saves on their way to or from host memory at once (autograd/swap.h)
constexpr int64_t kLeastSwapped = 64 << 10;            // bytes; smaller ones stay on the device (autograd/swap.h)

constexpr int64_t kThirdBlock = 256;  // values that samples with bits of their own are whole blocks of (tensor/third.h)

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
      check_size(out_);
      if (method_.plain) {
        add_plain();
      } else if (method_.shared) {
        add_shared();
      } else {
        add_by_layer();
      }
      after_.push_back(kept_bytes_ + in_flight());
    }
    return std::move(lines_);
  }

  /// What the layers up to each have kept on the device.
  const std::vector<int64_t>& after() const { return after_; }
  /// What waits in host memory.
  int64_t on_host() const { return std::accumulate(swapped_.begin(), swapped_.end(), int64_t{0}); }

 private:
  void check_size(int map) const {
    const ImageMap& m = map_of(map);  // at most 2^51 values
    if (m.values() <= kMostValues / images_) return;
    const auto text = [](int64_t n) { return std::to_string(n); };
    fail(kOp, "a map of the whole batch may have at most 2^56 values",
         text(images_) + " × " + text(m.channels) + " × " + text(m.height) + " × " + text(m.width) + " at " + layer_->name);
  }

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
        add_statistics(codes_normalised(method_.norm) ? 1 : 2);
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
    add_map(spec, in_, spec.side == Side::none ? 0 : channels);
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
    if (layer_->kind == LayerKind::max_pool) {
      add_packed("shared", spec, rows_of(out_));
    } else {
      add_map(spec, out_, 0);
    }
    if (spec.side == Side::none) add_row_mask();
    made_by_sharing_.insert(out_);
  }

  /// A shared map. Where its bits are shared out (Method::mean) it has so many as all others, and the ranges of each sample.
  void add_map(CodecSpec spec, int map, int64_t channels) {
    const ImageMap& m = map_of(map);
    const bool out = method_.mean > 0 && !m.row;
    const int64_t three = out ? samples_of_three(method_.mean, images_) : 0;
    if (three > 0 && three == images_) spec.bits = 3;
    add_packed("shared", spec, rows_of(map), channels);
    if (three > 0 && three < images_ && spec.block == kThirdBlock && m.values() % kThirdBlock == 0) {
      add("third bits", {three * m.height * m.width, m.channels}, 1, three * (m.values() / 8) + 4 * images_, 0);
    }
    if (out) add("statistics", {images_}, 64, 8 * images_, 8 * images_);
  }

  void add_input() {
    if (!kept_.insert(in_).second) return;
    add_packed("input", method_.input, shape_of(in_));
    // The ranges of each sample, float64, until backward tells the gradient that they are weighed with.
    if (is_mixed(method_.input)) add("statistics", {images_}, 64, 8 * images_, 8 * images_);
    if (std::holds_alternative<RandomProjection>(method_.input.transform)) add_seed();
  }

  void add_packed(const char* kind, const CodecSpec& spec, const std::vector<int64_t>& coded, int64_t channels = 0) {
    int64_t bytes = plan_of(coded, DType::f32, spec, channels, 1, kOp).at.total;
    if (is_mixed(spec)) {
      bytes = MixedCode{images_, count_of(coded, kOp) / images_, spec.block, mixed_budget(images_, spec.bits), spec.header}.total();
    }
    add(kind, coded, spec.bits, bytes, 4 * count_of(coded, kOp));
    if (!method_.swap || !is_mixed(spec) || bytes < kLeastSwapped) return;
    swapped_.push_back(bytes);
    kept_bytes_ -= bytes;
  }

  bool is_mixed(const CodecSpec& spec) const { return method_.adaptive && spec.bits <= kMostMixed; }

  /// The last saves that were swapped, still on their way out; in backward on their way back.
  int64_t in_flight() const {
    const auto first = swapped_.end() - static_cast<std::ptrdiff_t>(std::min(kInFlight, swapped_.size()));
    return std::accumulate(first, swapped_.end(), int64_t{0});
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
    if (total_ > kMostBytes) fail(kOp, "a model may keep at most 2^62 bytes: fewer or smaller images", std::to_string(images_) + " images");
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
  std::vector<int64_t> swapped_;  // bytes of saves that go to host memory
  std::vector<SavedTensor> lines_;
  std::vector<int64_t> after_;
};

void check(const BatchShape& batch, const Method& method) {
  if (batch.images < 1 || batch.images > kMostBatch) fail(kOp, "a batch must have 1 to 2^20 images", batch.images);
  validate(method, kOp);
}

/// What a layer's backward decodes at a time.
int64_t decoded_bytes(const ImageLayers& model, const ImageLayer& layer, int64_t images, const Method& method) {
  if (method.plain) return 0;
  return std::min(kDecodedBytes, 4 * images * model.maps[static_cast<size_t>(layer.inputs[0])].values());
}

}  // namespace

Method with_mean(const ImageShape& shape, const BatchShape& batch, const Method& given) {
  check(batch, given);
  Method method = given;
  method.budget = 0;
  if (given.budget == 0) return method;
  const ImageLayers model = layers_of(shape, batch.height, batch.width);
  const auto lines = [&](double mean) {
    method.mean = mean;
    return Lines(model, batch.images, method).make();
  };
  const int64_t two = total_bytes(lines(2)), three = total_bytes(lines(3));
  if (given.budget < two) fail(kOp, "budget must be at least the " + std::to_string(two) + " bytes that 2 bits take", given.budget);
  // Beside its bits a map of both kinds of samples has 4 bytes a sample; 16 more are what 3 bits in one piece may lose at their ends.
  const auto maps = std::ranges::count(lines(2.5), "third bits", &SavedTensor::kind);
  const auto rest = static_cast<double>(given.budget - two - maps * (4 * batch.images + 16));
  method.mean = given.budget >= three ? 3 : std::clamp(2 + rest / static_cast<double>(std::max<int64_t>(three - two, 1)), 2.0, 3.0);
  return method;
}

bool within_budget(const ImageShape& shape, const BatchShape& batch, const Method& given) {
  if (given.budget == 0) return true;
  Method least = given;
  least.budget = 0;
  least.mean = 2;
  return total_bytes(plan_image(shape, batch, least)) <= given.budget;
}

std::vector<SavedTensor> plan_image(const ImageShape& shape, const BatchShape& batch, const Method& given) {
  const Method method = with_mean(shape, batch, given);
  return Lines(layers_of(shape, batch.height, batch.width), batch.images, method).make();
}

ImageMemory memory_of(const ImageShape& shape, const BatchShape& batch, const Method& given) {
  const Method method = with_mean(shape, batch, given);
  const ImageLayers model = layers_of(shape, batch.height, batch.width);
  Lines lines(model, batch.images, method);
  ImageMemory memory;
  memory.saved = total_bytes(lines.make());
  for (const ImageLayer& layer : model.layers) memory.parameters += 4 * kWeightCopies * layer.parameters;
  if (!method.plain) memory.images = 4 * batch.images * model.maps[0].values();
  memory.swapped = lines.on_host();
  const std::vector<int64_t> alive = alive_values(model, method.shared), gradients = gradient_values(model, method.plain);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const int64_t forward = 4 * batch.images * alive[i];
    const int64_t backward = 4 * batch.images * gradients[i] + decoded_bytes(model, model.layers[i], batch.images, method);
    memory.fullest = std::max(memory.fullest, lines.after()[i] + std::max(forward, backward));
  }
  for (const ImageMap& map : model.maps) memory.slack = std::max(memory.slack, 4 * batch.images * map.values());
  return memory;
}

int64_t largest_batch(const ImageShape& shape, int64_t height, int64_t width, const Method& method, int64_t budget) {
  if (budget < 1 || budget > kMostBudget) fail(kOp, "a budget must be 1 to 2^55 bytes", budget);
  const auto fits = [&](int64_t images) {
    const BatchShape batch{images, height, width};
    return within_budget(shape, batch, method) && memory_of(shape, batch, method).reserved() <= budget;
  };
  if (!fits(1)) return 0;
  int64_t most = 1, least_not = 2;
  while (least_not <= kMostBatch && fits(least_not)) {
    most = least_not;
    least_not *= 2;
  }
  least_not = std::min(least_not, kMostBatch + 1);
  while (least_not - most > 1) {
    const int64_t middle = most + (least_not - most) / 2;
    (fits(middle) ? most : least_not) = middle;
  }
  return most;
}

}  // namespace satchel
