#include "satchel/plan/image_plan.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <set>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/kernels/codec_layout.h"
#include "satchel/plan/image_step.h"
#include "satchel/plan/kept_line.h"

namespace satchel {
namespace {

constexpr const char* kOp = "plan";
constexpr int64_t kMostBytes = int64_t{1} << 62, kMostValues = int64_t{1} << 56;
constexpr int64_t kExtraBitBlock = 256;  // values that samples with bits of their own are whole blocks of (tensor/extra_bit.h)

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
      if (!map_of(out_).constant) is_baseline(method_) ? add_baseline() : add_kept();
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
  void add_baseline() {
    using enum LayerKind;
    switch (layer_->kind) {
      case conv:
      case linear: add_float_once("input", in_); return add_baseline_weight();
      case norm:
        if (layer_->frozen_norm) return add_baseline_relu();
        add_float_once("norm", in_);
        add("statistics", {2, map_of(in_).channels}, 32, 8 * map_of(in_).channels, 8 * map_of(in_).channels);
        return add_baseline_relu();
      case relu: return add_baseline_relu();
      case dropout: return add("dropout", shape_of(out_), 8, values(out_), values(out_));
      case max_pool: add_float_once("input", in_); return add("indices", shape_of(out_), 64, 8 * values(out_), 8 * values(out_));
      case average_pool:
        // A mean over the whole map, as torch averages to 1×1, keeps nothing.
        if (layer_->window == 1 && map_of(out_).channels == map_of(in_).channels) return;
        return add_float_once("input", in_);
      case relu6:
      case smooth: return add_float_once("activation", layer_->smooth == Smooth::sigmoid ? out_ : in_);
      case gate: add_float_once("input", in_); return add_float_once("input", layer_->inputs[1]);
      case drop_samples: return add("dropout", {images_}, width(), width() / 8 * images_, width() / 8 * images_);
      case concat:
      case sum:
      case upsample: return;
    }
  }

  /// Autocast's copy of a weight, which the input's gradient is computed with.
  void add_baseline_weight() {
    if (type_ == DType::f32) return;
    const int64_t out = map_of(out_).channels;
    const int64_t count =
        out * (layer_->kind == LayerKind::linear ? map_of(in_).values()
                                                 : map_of(in_).channels / layer_->groups * layer_->window * layer_->window);
    add("weight", {count}, 16, 2 * count, 2 * count);
  }

  /// A ReLU keeps its result, which stands in the next layer's line where a weight reads it.
  void add_baseline_relu() {
    if (!layer_->relu) return;
    if (layer_->dropout || !weighed_.contains(out_)) add_float_once("activation", layer_->dropout ? -1 : out_);
    if (layer_->dropout) add("dropout", shape_of(out_), 8, values(out_), values(out_));
  }

  void add_kept() {
    using enum LayerKind;
    switch (layer_->kind) {
      case conv:
      case linear: return add_input();
      case norm:
      case relu:
      case dropout: return add_epilogue();
      case max_pool:
        add_offsets();
        // The output of a ReLU that its readers rebuild is packed when the first convolution asks for it; no mask: its own gradient goes by
        // the offsets.
        if (!rebuilt_.contains(in_) || !weighed_.contains(out_)) return;
        add(*find(keeps_of(method_, relu_site()), Kind::shared), rows_of(out_), rows_of(out_));
        rebuilt_.insert(out_);
        return;
      case relu6: return add("mask", shape_of(out_), 1, ceil_div(values(out_), 8), values(out_));
      case smooth: return add(kept_line(layer_->name, derivative(), {shape_of(out_), {}, 0, type_}));
      case gate: return add_gate();
      case drop_samples: return add("seed", {1}, 64, 8, 8);
      case average_pool:
      case concat:
      case sum:
      case upsample: return;
    }
  }

  Keep derivative() const { return keeps_of(method_, {Role::derivative}).front(); }

  /// The map packed, the numbers that it is multiplied with as they are.
  void add_gate() {
    for (const Keep& keep : keeps_of(method_, {Role::weight_input})) add(kept_line(layer_->name, keep, {shape_of(in_), {}, 0, type_}));
    const int scale = layer_->inputs[1];
    add("gate", shape_of(scale), width(), width() / 8 * values(scale), width() / 8 * values(scale));
    if (reads_producer(method_)) rebuilt_.insert(out_);  // the convolution behind it makes the product again
  }

  /// What a norm keeps for itself, where the layer with weights that reads its output can be served from that: with γ and β beside it.
  std::vector<Keep> shared_with_reader(std::vector<Keep> keeps) const {
    keeps.front().kind = Kind::shared;
    keeps.insert(keeps.begin() + 1, {Kind::affine});
    return keeps;
  }

  Site relu_site() const {
    Site site;
    site.activation = Activation::relu;
    site.image = !map_of(out_).row;
    site.width = map_of(out_).channels;
    return site;
  }

  /// A norm, the residual sum, ReLU and dropout, or those of them that the layer has.
  void add_epilogue() {
    const bool normed = layer_->kind == LayerKind::norm;
    Site site = relu_site();
    site.norm = normed ? Norm::batch : Norm::none;
    site.activation = layer_->relu ? Activation::relu : Activation::none;
    site.adds_skip = layer_->inputs.size() > 1;
    site.drops = layer_->kind == LayerKind::dropout || (layer_->dropout && !normed);
    site.next_reads = layer_->relu;
    site.count = normed && !layer_->frozen_norm && !map_of(in_).constant ? rows_of(in_)[0] : 0;
    std::vector<Keep> keeps = keeps_of(method_, site);
    const bool read_alone = normed && !layer_->relu && !site.adds_skip && weighed_.contains(out_) && reads_producer(method_);
    if (read_alone && serves_weights(method_, keeps.front().spec, /*after_relu=*/false)) keeps = shared_with_reader(std::move(keeps));
    const bool serves_next = find(keeps, Kind::shared) != nullptr;
    for (Keep keep : keeps) {
      if (layer_->frozen_norm && keep.kind == Kind::norm) continue;  // its gradient reads the deviation alone
      if (layer_->frozen_norm && keep.kind == Kind::statistics) keep.numbers = 1;
      // Layers that share code rows; a norm of its own codes samples, as the papers block them.
      const bool rows = serves_next || reads_producer(method_);
      const int coded = normed && keep.of != Of::output ? in_ : out_;
      const bool dropped = keep.kind == Kind::dropout;
      add(keep, rows ? rows_of(coded) : shape_of(coded), rows && !dropped ? rows_of(out_) : shape_of(out_));
    }
    // A dropout's reader redraws its mask.
    if (serves_next || (layer_->kind == LayerKind::dropout && rebuilt_.contains(in_))) rebuilt_.insert(out_);
  }

  void add_input() {
    if (rebuilt_.contains(in_) || !kept_.insert(in_).second) return;
    for (const Keep& keep : keeps_of(method_, {Role::weight_input})) add(keep, shape_of(in_), shape_of(in_));
  }

  /// `coded` as kept_line() takes it, `masked` too. Where bits are allocated to samples, the ranges of each are kept, float64, until
  /// backward tells the gradient that they are weighed with.
  void add(Keep keep, const std::vector<int64_t>& coded, const std::vector<int64_t>& masked) {
    const ImageMap& map = map_of(keep.kind == Kind::input ? in_ : out_);
    const bool pool = layer_->kind == LayerKind::max_pool;
    const bool allocated = keep.mean_bits > 0 && !map.row && !pool;
    const int64_t three = allocated ? samples_of_three(keep.mean_bits, images_) : 0;
    if (three > 0 && three == images_) keep.spec.bits = 3;
    add(kept_line(layer_->name, keep, {coded, masked, map_of(in_).channels, type_}));
    if (three > 0 && three < images_ && keep.spec.block == kExtraBitBlock && map.values() % kExtraBitBlock == 0) {
      add("extra bit", {three * map.height * map.width, map.channels}, 1, three * (map.values() / 8) + 4 * images_, 0);
    }
    const bool by_sample = keep.kind == Kind::input && has_per_sample_bits(keep);
    if (allocated || by_sample) add("statistics", {images_}, 64, 8 * images_, 8 * images_);
  }

  /// Where in its window each value of a pool came from, in as few bits as the window needs.
  void add_offsets() {
    const int bits = std::bit_width(static_cast<uint64_t>(layer_->window * layer_->window - 1));
    add("offsets", shape_of(out_), bits, code_bytes(values(out_), bits), 8 * values(out_));
  }

  void add_float_once(const char* kind, int map) {
    if (map >= 0 && !kept_.insert(map).second) return;
    const int of = map < 0 ? out_ : map;
    add(kind, shape_of(of), width(), size_of(type_) * values(of), 4 * values(of));
  }

  void add(const char* kind, std::vector<int64_t> shape, int bits, int64_t bytes, int64_t fp32_bytes) {
    add({layer_->name, kind, std::move(shape), bits, bytes, fp32_bytes});
  }
  void add(SavedTensor line) {
    total_ += std::max(line.bytes, line.fp32_bytes);  // each below 2^60
    if (total_ > kMostBytes) fail(kOp, "a model may keep at most 2^62 bytes: fewer or smaller images", std::to_string(images_) + " images");
    lines_.push_back(std::move(line));
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
  int width() const { return static_cast<int>(8 * size_of(type_)); }  // bits of a value that is kept as it is

  const ImageLayers& model_;
  const int64_t images_;
  const DType type_;  // in which layers compute: bf16 stands for both types of 16 bits
  const Method& method_;
  const ImageLayer* layer_ = nullptr;
  int in_ = 0, out_ = 0;
  std::set<int> weighed_;  // maps that a convolution or a linear layer reads
  std::set<int> kept_;     // maps with a line
  std::set<int> rebuilt_;  // maps that their readers rebuild from what their maker keeps
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
  const int64_t budget = budget_of(given);
  if (budget == 0) return given;
  const ImageLayers model = layers_of(shape, batch.height, batch.width);
  const auto lines = [&](double mean) { return Lines(model, batch, with_mean_bits(given, mean)).make(); };
  const int64_t two = total_bytes(lines(2)), three = total_bytes(lines(3));
  if (budget < two) fail(kOp, "budget must be at least the " + std::to_string(two) + " bytes that 2 bits take", budget);
  const auto mean_of = [&](int64_t samples) { return 2 + static_cast<double>(samples) / static_cast<double>(batch.images); };
  const auto pays = [&](int64_t samples) {  // 3 bits for so many of them; a map in one piece of 3 bits may lose 16 bytes at its end
    const std::vector<SavedTensor> kept = lines(mean_of(samples));
    return total_bytes(kept) + 16 * std::ranges::count(kept, "extra bit", &SavedTensor::kind) <= budget;
  };
  int64_t most = budget >= three ? batch.images : 0, least_not = batch.images;
  while (least_not - most > 1) {
    const int64_t middle = most + (least_not - most) / 2;
    (pays(middle) ? most : least_not) = middle;
  }
  return with_mean_bits(given, mean_of(most));
}

bool within_budget(const ImageShape& shape, const BatchShape& batch, const Method& given) {
  const int64_t budget = budget_of(given);
  return budget == 0 || total_bytes(plan_image(shape, batch, with_mean_bits(given, 2))) <= budget;
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
