#include "satchel/plan/image_plan.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <set>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/plan/image_step.h"
#include "satchel/plan/sample_bits.h"
#include "satchel/tensor/plan.h"

namespace satchel {
namespace {

constexpr const char* kOp = "plan";
constexpr int64_t kMostBytes = int64_t{1} << 62, kMostValues = int64_t{1} << 56;
constexpr int64_t kThirdBlock = 256;  // values that samples with bits of their own are whole blocks of (tensor/third.h)

/// The lines of a model, layer by layer in the order of the forward pass.
class Lines {
 public:
  Lines(const ImageLayers& model, const BatchShape& batch, const Method& method)
      : model_(model), images_(batch.images), type_(batch.half ? DType::bf16 : DType::f32), method_(method) {
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
      ends_.push_back(lines_.size());
    }
    return std::move(lines_);
  }

  /// How many lines the layers up to each have.
  const std::vector<size_t>& ends() const { return ends_; }

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
      case linear: add_float_once("input", in_); return add_plain_weight();
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

  /// Autocast's copy of a weight, which the input's gradient is computed with.
  void add_plain_weight() {
    if (type_ == DType::f32) return;
    const int64_t out = map_of(out_).channels;
    const int64_t count =
        out * (layer_->kind == LayerKind::linear ? map_of(in_).values() : map_of(in_).channels * layer_->window * layer_->window);
    add("weight", {count}, 16, 2 * count, 2 * count);
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
        add_packed("norm", norm_spec(method_, map_of(in_).channels, 0), shape_of(in_), 0,
                   codes_normalised(method_.norm) ? DType::f32 : type_);
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
    const CodecSpec spec = shared_spec(method_, Norm::batch, Activation::relu, channels, rows_of(in_)[0]);
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
    add_packed("norm", norm_spec(method_, map_of(in_).channels, rows_of(in_)[0]), rows_of(in_));
    add_statistics(1);
    if (layer_->relu) add_relu_form();
  }

  void add_relu_form() {
    const CodecSpec spec = shared_spec(method_, Norm::none, Activation::relu, map_of(out_).channels, 0);
    if (layer_->kind == LayerKind::max_pool) {
      add_packed("shared", spec, rows_of(out_), 0, type_);  // no mask: its own gradient goes by the offsets
    } else {
      add_map(spec, out_, 0, type_);
      if (spec.side == Side::none) add_row_mask();
    }
    made_by_sharing_.insert(out_);
  }

  /// A shared map. Where its bits are shared out (Method::mean) it has so many as all others, and the ranges of each sample.
  void add_map(CodecSpec spec, int map, int64_t channels, DType type = DType::f32) {
    const ImageMap& m = map_of(map);
    const bool out = method_.mean > 0 && !m.row && spec.bits == 2;
    const int64_t three = out ? samples_of_three(method_.mean, images_) : 0;
    if (three > 0 && three == images_) spec.bits = 3;
    add_packed("shared", spec, rows_of(map), channels, type);
    if (three > 0 && three < images_ && spec.block == kThirdBlock && m.values() % kThirdBlock == 0) {
      add("third bits", {three * m.height * m.width, m.channels}, 1, three * (m.values() / 8) + 4 * images_, 0);
    }
    if (out) add("statistics", {images_}, 64, 8 * images_, 8 * images_);
  }

  void add_input() {
    if (!kept_.insert(in_).second) return;
    add_packed("input", method_.input, shape_of(in_), 0, type_);
    // The ranges of each sample, float64, until backward tells the gradient that they are weighed with.
    if (has_sample_bits(method_, method_.input)) add("statistics", {images_}, 64, 8 * images_, 8 * images_);
    if (std::holds_alternative<RandomProjection>(method_.input.transform)) add_seed();
  }

  /// `type`: of what is packed, which tells where it is kept as it is (32 bits).
  void add_packed(const char* kind, const CodecSpec& spec, const std::vector<int64_t>& coded, int64_t channels = 0,
                  DType type = DType::f32) {
    const bool by_sample = has_sample_bits(method_, spec);
    const int64_t bytes = by_sample ? bytes_by_sample(coded, spec, kOp) : plan_of(coded, type, spec, channels, 1, kOp).at.total;
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
    add(kind, shape_of(of), static_cast<int>(8 * size_of(type_)), size_of(type_) * values(of), 4 * values(of));
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
  const DType type_;  // in which layers compute: bf16 stands for both types of 16 bits
  const Method& method_;
  const ImageLayer* layer_ = nullptr;
  int in_ = 0, out_ = 0;
  std::set<int> weighed_;          // maps that a convolution or a linear layer reads
  std::set<int> kept_;             // maps with a line
  std::set<int> made_by_sharing_;  // maps that their readers rebuild from a shared save
  int64_t total_ = 0;
  std::vector<SavedTensor> lines_;
  std::vector<size_t> ends_;  // of each layer's lines
};

void check(const BatchShape& batch, const Method& method) {
  if (batch.images < 1 || batch.images > kMostBatch) fail(kOp, "a batch must have 1 to 2^20 images", batch.images);
  validate(method, kOp);
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
    return Lines(model, batch, method).make();
  };
  const int64_t two = total_bytes(lines(2)), three = total_bytes(lines(3));
  if (given.budget < two) fail(kOp, "budget must be at least the " + std::to_string(two) + " bytes that 2 bits take", given.budget);
  const auto mean_of = [&](int64_t samples) { return 2 + static_cast<double>(samples) / static_cast<double>(batch.images); };
  const auto pays = [&](int64_t samples) {  // 3 bits for so many of them; a map in one piece of 3 bits may lose 16 bytes at its end
    const std::vector<SavedTensor> kept = lines(mean_of(samples));
    return total_bytes(kept) + 16 * std::ranges::count(kept, "third bits", &SavedTensor::kind) <= given.budget;
  };
  int64_t most = given.budget >= three ? batch.images : 0, least_not = batch.images;
  while (least_not - most > 1) {
    const int64_t middle = most + (least_not - most) / 2;
    (pays(middle) ? most : least_not) = middle;
  }
  method.mean = mean_of(most);
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
  return Lines(layers_of(shape, batch.height, batch.width), batch, method).make();
}

std::vector<std::vector<SavedTensor>> saves_by_layer(const ImageLayers& model, const BatchShape& batch, const Method& method) {
  Lines lines(model, batch, method);
  const std::vector<SavedTensor> all = lines.make();
  std::vector<std::vector<SavedTensor>> layers;
  auto first = all.begin();
  for (const size_t end : lines.ends()) {
    const auto last = all.begin() + static_cast<std::ptrdiff_t>(end);
    layers.emplace_back(first, last);
    first = last;
  }
  return layers;
}

}  // namespace satchel
