#include "satchel/plan/image_shape.h"

#include <algorithm>
#include <array>

#include "satchel/core/error.h"

namespace satchel {
namespace {

constexpr const char* kOp = "plan";
constexpr int64_t kMostWidth = 1 << 12, kMostClasses = 1 << 24, kMostSide = 1 << 16;
constexpr int64_t kSmall = 64;  // pixels

struct Known {
  std::string_view name;
  std::array<int64_t, 5> stages;  // 0: no such stage
};
constexpr std::array<Known, 9> kModels = {{{"resnet18", {2, 2, 2, 2}},
                                           {"resnet34", {3, 4, 6, 3}},
                                           {"resnet50", {3, 4, 6, 3}},
                                           {"resnet101", {3, 4, 23, 3}},
                                           {"resnet152", {3, 8, 36, 3}},
                                           {"wide_resnet50_2", {3, 4, 6, 3}},
                                           {"vgg16", {2, 2, 3, 3, 3}},
                                           {"vgg16_bn", {2, 2, 3, 3, 3}},
                                           {"densenet121", {6, 12, 24, 16}}}};

constexpr std::array<std::string_view, kModels.size()> names_of_models() {
  std::array<std::string_view, kModels.size()> names;
  for (size_t i = 0; i < names.size(); ++i) names[i] = kModels[i].name;
  return names;
}
constexpr auto kNames = names_of_models();
constexpr std::array<std::string_view, 4> kSegmentation = {"fcn_resnet50", "fcn_resnet101", "deeplabv3_resnet50", "deeplabv3_resnet101"};

void check_within(const char* op, const char* what, int64_t value, int64_t most, const char* most_text) {
  if (value < 1 || value > most) fail(op, std::string(what) + " must be 1 to " + most_text, value);
}

/// Layers in the order of the forward pass. Each call gives the map it makes.
class Layers {
 public:
  Layers(const ImageShape& shape, int64_t height, int64_t width) : shape_(shape) {
    list_.maps.push_back({shape.channels, height, width});
    if (is_segmentation_model(shape.name)) {
      segmentation();
    } else if (is_resnet(shape.name)) {
      resnet();
    } else if (shape.name.starts_with("vgg")) {
      vgg();
    } else {
      densenet();
    }
  }
  ImageLayers take() { return std::move(list_); }

 private:
  struct Conv {
    int64_t channels, window, stride = 1;
    bool bias = false;
  };

  int add(LayerKind kind, const std::string& name, std::vector<int> inputs, const ImageMap& out, int64_t parameters = 0, int64_t window = 1,
          bool relu = false) {
    list_.maps.push_back(out);
    list_.layers.push_back({kind, name, std::move(inputs), static_cast<int>(list_.maps.size()) - 1, relu, false, window, parameters});
    return list_.layers.back().output;
  }

  /// Padded by half of its window.
  int conv(const std::string& name, int x, const Conv& c) {
    const ImageMap& in = map(x);
    const int64_t border = c.window / 2 * 2 - c.window;
    const ImageMap out = {c.channels, (in.height + border) / c.stride + 1, (in.width + border) / c.stride + 1};
    return add(LayerKind::conv, name, {x}, out, c.channels * (in.channels * c.window * c.window + (c.bias ? 1 : 0)), c.window);
  }

  int norm(const std::string& name, int x, bool relu = true, std::vector<int> skip = {}) {
    skip.insert(skip.begin(), x);
    return add(LayerKind::norm, name, std::move(skip), map(x), 2 * map(x).channels, 1, relu);
  }

  /// A window of 3 is padded by 1, one of 2 by nothing.
  int pool(LayerKind kind, const std::string& name, int x, int64_t window) {
    const ImageMap& in = map(x);
    const int64_t border = window / 2 * 2 - window + (window == 2 ? -2 : 0);
    const auto side = [&](int64_t n) { return (n + border) / 2 + 1; };
    return add(kind, name, {x}, {in.channels, side(in.height), side(in.width)}, 0, window);
  }

  /// To a side of so many pixels, as a row.
  int average(const std::string& name, int x, int64_t side) {
    return add(LayerKind::average_pool, name, {x}, {map(x).channels * side * side, 1, 1, true});
  }

  int linear(const std::string& name, int x, int64_t out) {
    return add(LayerKind::linear, name, {x}, {out, 1, 1, true}, out * (map(x).values() + 1));
  }

  int upsample(const std::string& name, int x, const ImageMap& like) {
    return add(LayerKind::upsample, name, {x}, {map(x).channels, like.height, like.width});
  }

  int dropout(const std::string& name, int x) { return dropout_of(shape_) > 0 ? add(LayerKind::dropout, name, {x}, map(x)) : x; }

  int stem(const std::string& conv_name, const std::string& norm_name, const std::string& pool_name) {
    const bool small = shape_.small_stem;
    const int x = norm(norm_name, conv(conv_name, 0, {shape_.width, small ? 3 : 7, small ? 1 : 2}));
    return small ? x : pool(LayerKind::max_pool, pool_name, x, 3);
  }

  void resnet() {
    int x = stem("conv1", "bn1", "maxpool");
    const auto stages = stages_of(shape_.name);
    for (size_t s = 0; s < stages.size(); ++s) {
      for (int64_t b = 0; b < stages[s]; ++b) {
        x = block("layer" + std::to_string(s + 1) + "." + std::to_string(b) + ".", x, shape_.width << s, b == 0 && s > 0 ? 2 : 1);
      }
    }
    linear("fc", dropout("dropout", average("avgpool", x, 1)), shape_.classes);
  }

  int block(const std::string& at, int x, int64_t width, int64_t stride) {
    const std::string_view name = backbone_of(shape_.name);
    const bool narrow = has_bottleneck(name);
    const int64_t planes = width * widening_of(name), out = narrow ? width * kExpansion : width;
    int h = conv(at + "conv1", x, narrow ? Conv{planes, 1} : Conv{planes, 3, stride});
    list_.layers.back().meets = true;
    h = norm(at + "bn1", h);
    if (narrow) h = norm(at + "bn2", conv(at + "conv2", h, {planes, 3, stride}));
    int skip = x;
    if (stride != 1 || map(x).channels != out) {
      skip = norm(at + "downsample.1", conv(at + "downsample.0", x, {out, 1, stride}), false);
    }
    h = narrow ? conv(at + "conv3", h, {out, 1}) : conv(at + "conv2", h, {planes, 3});
    return norm(at + (narrow ? "bn3" : "bn2"), h, true, {skip});
  }

  /// Windows that are spread out read as many values, so that dilation changes no size here.
  void segmentation() {
    const std::string at = "backbone.";
    int x = stem(at + "conv1", at + "bn1", at + "maxpool"), third = 0;
    const auto stages = stages_of(shape_.name);
    for (size_t s = 0; s < stages.size(); ++s) {
      for (int64_t b = 0; b < stages[s]; ++b) {
        x = block(at + "layer" + std::to_string(s + 1) + "." + std::to_string(b) + ".", x, shape_.width << s, b == 0 && s == 1 ? 2 : 1);
      }
      if (s == 2) third = x;
    }
    const int out = shape_.name.starts_with("fcn") ? fcn_head("classifier.", x) : deeplab_head("classifier.", x);
    if (shape_.aux) joined("logits", {out, fcn_head("aux_classifier.", third)});
    list_.large_logits = shape_.classes * map(0).height * map(0).width;
  }

  int fcn_head(const std::string& at, int x) {
    const int h = norm(at + "1", conv(at + "0", x, {map(x).channels / 4, 3}));
    return conv(at + "4", dropout(at + "3", h), {shape_.classes, 1, 1, true});
  }

  int deeplab_head(const std::string& at, int x) {
    const int64_t width = kDeepLabWidth * shape_.width;
    std::vector<int> parts;
    for (int64_t k = 0; k < 4; ++k) {
      const std::string name = at + "0.convs." + std::to_string(k) + ".";
      parts.push_back(norm(name + "1", conv(name + "0", x, {width, k == 0 ? 1 : 3})));
    }
    const std::string pooled = at + "0.convs.4.";
    const int mean = add(LayerKind::average_pool, pooled + "0", {x}, {map(x).channels, 1, 1});
    parts.push_back(upsample(pooled + "upsample", norm(pooled + "2", conv(pooled + "1", mean, {width, 1})), map(x)));
    const int h = norm(at + "0.project.1", conv(at + "0.project.0", joined(at + "0", parts), {width, 1}));
    const int deep = norm(at + "2", conv(at + "1", dropout(at + "0.project.3", h), {width, 3}));
    return conv(at + "4", deep, {shape_.classes, 1, 1, true});
  }

  void vgg() {
    const bool normed = shape_.name == "vgg16_bn";
    int x = 0, at = 0;
    const auto name = [&] { return "features." + std::to_string(at++); };
    const auto stages = stages_of(shape_.name);
    for (size_t s = 0; s < stages.size(); ++s) {
      int read = x;
      for (int64_t i = 0; i < stages[s]; ++i) {
        read = x;
        x = conv(name(), x, {shape_.width << std::min<size_t>(s, 3), 3, 1, true});
        x = normed ? norm(name(), x) : relu(name(), x);
        list_.layers.back().held = read;
        at += normed ? 1 : 0;  // the ReLU is in the norm's call
      }
      x = pool(LayerKind::max_pool, name(), x, 2);
      list_.layers.back().held = read;
    }
    x = average("avgpool", x, shape_.small_stem ? 1 : kVggPooled);
    const int64_t hidden = shape_.small_stem ? map(x).channels : kVggHidden;
    x = relu("classifier.1", linear("classifier.0", x, hidden), dropout_of(shape_) > 0);
    x = relu("classifier.4", linear("classifier.3", x, hidden), dropout_of(shape_) > 0);
    linear("classifier.6", x, shape_.classes);
  }

  int relu(const std::string& name, int x, bool dropped = false) {
    const int out = add(LayerKind::relu, name, {x}, map(x), 0, 1, true);
    list_.layers.back().dropout = dropped;
    return out;
  }

  void densenet() {
    const int64_t growth = shape_.width / 2;
    int x = stem("features.conv0", "features.norm0", "features.pool0");
    const auto stages = stages_of(shape_.name);
    for (size_t s = 0; s < stages.size(); ++s) {
      const std::string number = std::to_string(s + 1), between = "features.transition" + number + ".";
      x = dense_block("features.denseblock" + number + ".denselayer", x, stages[s], growth);
      if (s + 1 == stages.size()) break;
      x = conv(between + "conv", norm(between + "norm", x), {map(x).channels / 2, 1});
      x = pool(LayerKind::average_pool, between + "pool", x, 2);
    }
    linear("classifier", dropout("dropout", average("avgpool", norm("features.norm5", x), 1)), shape_.classes);
  }

  int dense_block(const std::string& at, int x, int64_t count, int64_t growth) {
    std::vector<int> made = {x};
    for (int64_t i = 0; i < count; ++i) {
      const std::string name = at + std::to_string(i + 1);
      const int h = conv(name + ".conv1", norm(name + ".norm1", joined(name, made)), {kExpansion * growth, 1});
      made.push_back(conv(name + ".conv2", norm(name + ".norm2", h), {growth, 3}));
    }
    return joined(at.substr(0, at.rfind('.')), made);
  }

  int joined(const std::string& name, const std::vector<int>& maps) {
    if (maps.size() == 1) return maps[0];
    ImageMap out = map(maps[0]);
    for (size_t i = 1; i < maps.size(); ++i) out.channels += map(maps[i]).channels;
    return add(LayerKind::concat, name, maps, out);
  }

  ImageMap map(int i) const { return list_.maps[static_cast<size_t>(i)]; }

  const ImageShape& shape_;
  ImageLayers list_;
};

}  // namespace

std::span<const std::string_view> image_model_names() { return kNames; }

bool is_image_model(std::string_view name) { return std::ranges::find(kNames, name) != kNames.end(); }

std::span<const std::string_view> segmentation_model_names() { return kSegmentation; }

bool is_segmentation_model(std::string_view name) { return std::ranges::find(kSegmentation, name) != kSegmentation.end(); }

std::string_view backbone_of(std::string_view name) { return is_segmentation_model(name) ? name.substr(name.find('_') + 1) : name; }

std::span<const int64_t> stages_of(std::string_view name) {
  const auto found = std::ranges::find(kModels, backbone_of(name), &Known::name);
  if (found == kModels.end()) fail(kOp, "an image model has stages", "'" + std::string(name) + "'");
  return {found->stages.begin(), std::ranges::find(found->stages, 0)};
}

bool is_resnet(std::string_view name) { return name.starts_with("resnet") || name.starts_with("wide_resnet"); }

bool has_bottleneck(std::string_view name) { return is_resnet(name) && name != "resnet18" && name != "resnet34"; }

int64_t widening_of(std::string_view name) { return name == "wide_resnet50_2" ? 2 : 1; }

double dropout_of(const ImageShape& shape) {
  const bool deeplab = shape.name.starts_with("deeplabv3");
  if (is_segmentation_model(shape.name)) return shape.dropout.value_or(deeplab ? kDeepLabDropout : kFcnDropout);
  return shape.dropout.value_or(shape.name.starts_with("vgg") ? kVggDropout : 0);
}

bool wants_small_stem(int64_t height, int64_t width) { return height <= kSmall && width <= kSmall; }

int64_t least_side(const ImageShape& shape) {
  const auto stages = static_cast<int64_t>(stages_of(shape.name).size());
  if (shape.name.starts_with("vgg")) return int64_t{1} << stages;  // halved after each stage
  if (is_resnet(backbone_of(shape.name))) return 1;                // every window is padded
  const int64_t first = int64_t{1} << (stages - 1);                // DenseNet: halved between stages
  return shape.small_stem ? first : 4 * (first - 1) + 1;           // its large stem halves twice, and rounds up
}

void check_side(const ImageShape& shape, int64_t height, int64_t width, const char* op) {
  const auto sides = [](int64_t a, int64_t b) { return std::to_string(a) + " × " + std::to_string(b); };
  const int64_t least = least_side(shape);
  const auto within = [&](int64_t side) { return side >= least && side <= kMostSide; };
  if (within(height) && within(width)) return;
  const bool large = height > kMostSide || width > kMostSide;
  fail(op, "images must be " + (large ? "at most 65536 × 65536" : "at least " + sides(least, least) + " for " + shape.name),
       sides(height, width));
}

void validate(const ImageShape& shape, const char* op) {
  if (shape.aux && !is_segmentation_model(shape.name)) fail(op, "an auxiliary head is for segmentation", shape.name);
  if (!is_image_model(shape.name) && !is_segmentation_model(shape.name)) {
    std::string names;
    for (const std::string_view name : kNames) names += (names.empty() ? "" : ", ") + std::string(name);
    fail(op, "an image model must be one of " + names, "'" + shape.name + "'");
  }
  check_within(op, "classes", shape.classes, kMostClasses, "2^24");
  check_within(op, "channels", shape.channels, kMostWidth, "4096");
  check_within(op, "width", shape.width, kMostWidth, "4096");
  if (shape.name.starts_with("densenet") && shape.width % 2 != 0) fail(op, "width must be even for densenet121", shape.width);
  const double dropout = dropout_of(shape);
  if (!(dropout >= 0 && dropout < 1)) fail(op, "dropout must be at least 0 and less than 1", dropout);
}

ImageLayers layers_of(const ImageShape& shape, int64_t height, int64_t width) {
  validate(shape, kOp);
  check_side(shape, height, width, kOp);
  return Layers(shape, height, width).take();
}

}  // namespace satchel
