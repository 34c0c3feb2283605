#include "satchel/plan/image_shape.h"

#include <algorithm>
#include <array>

#include "satchel/core/error.h"
#include "satchel/plan/layer_list.h"
#include "satchel/plan/mobile_shape.h"

namespace satchel {
namespace {

constexpr const char* kOp = "plan";
constexpr int64_t kMostWidth = 1 << 12, kMostClasses = 1 << 24, kMostSide = 1 << 16;
constexpr int64_t kSmall = 64;  // pixels

struct Known {
  std::string_view name;
  std::array<int64_t, 5> stages;  // 0: no such stage
};
constexpr std::array<Known, 14> kModels = {{{"resnet18", {2, 2, 2, 2}},
                                            {"resnet34", {3, 4, 6, 3}},
                                            {"resnet50", {3, 4, 6, 3}},
                                            {"resnet101", {3, 4, 23, 3}},
                                            {"resnet152", {3, 8, 36, 3}},
                                            {"wide_resnet50_2", {3, 4, 6, 3}},
                                            {"vgg16", {2, 2, 3, 3, 3}},
                                            {"vgg16_bn", {2, 2, 3, 3, 3}},
                                            {"densenet121", {6, 12, 24, 16}},
                                            {"densenet161", {6, 12, 36, 24}},
                                            {"mobilenet_v2", {}},
                                            {"efficientnet_b0", {}},
                                            {"preresnet56", {9, 9, 9}},
                                            {"preresnet164", {18, 18, 18}}}};

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

/// The layers of each family.
class Layers : private LayerList {
 public:
  Layers(const ImageShape& shape, int64_t height, int64_t width) : LayerList(shape, height, width), shape_(this->shape()) {
    if (is_segmentation_model(shape.name)) {
      segmentation();
    } else if (is_resnet(shape.name)) {
      resnet();
    } else if (shape.name.starts_with("vgg")) {
      vgg();
    } else if (is_mobile(shape.name)) {
      add_mobile(*this);
    } else if (is_preresnet(shape.name)) {
      preresnet();
    } else {
      densenet();
    }
  }
  using LayerList::take;

 private:
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
    last().meets = true;
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
    set_large_logits(shape_.classes * map(0).height * map(0).width);
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
    const int mean = squeeze(pooled + "0", x);
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
        last().held = read;
        at += normed ? 1 : 0;  // the ReLU is in the norm's call
      }
      x = pool(LayerKind::max_pool, name(), x, 2);
      last().held = read;
    }
    x = average("avgpool", x, shape_.small_stem ? 1 : kVggPooled);
    const int64_t hidden = shape_.small_stem ? map(x).channels : kVggHidden;
    x = relu("classifier.1", linear("classifier.0", x, hidden), dropout_of(shape_) > 0);
    x = relu("classifier.4", linear("classifier.3", x, hidden), dropout_of(shape_) > 0);
    linear("classifier.6", x, shape_.classes);
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

  void preresnet() {
    int x = conv("conv1", 0, {shape_.width, 3});
    const auto stages = stages_of(shape_.name);
    for (size_t s = 0; s < stages.size(); ++s) {
      for (int64_t b = 0; b < stages[s]; ++b) {
        x = preresnet_block("layer" + std::to_string(s + 1) + "." + std::to_string(b) + ".", x, shape_.width << s, b == 0 && s > 0 ? 2 : 1);
      }
    }
    linear("fc", dropout("dropout", average("avgpool", norm("bn", x), 1)), shape_.classes);
  }

  int preresnet_block(const std::string& at, int x, int64_t planes, int64_t stride) {
    const bool narrow = has_bottleneck(shape_.name);
    const int64_t out = narrow ? planes * kExpansion : planes;
    int h = norm(at + "bn1", x), skip = x;
    if (stride != 1 || map(x).channels != out) skip = conv(at + "downsample.0", h, {out, 1, stride});
    h = conv(at + "conv1", h, narrow ? Conv{planes, 1} : Conv{planes, 3, stride});
    h = conv(at + "conv2", norm(at + "bn2", h), narrow ? Conv{planes, 3, stride} : Conv{planes, 3});
    if (narrow) h = conv(at + "conv3", norm(at + "bn3", h), {out, 1});
    return sum(at + "sum", h, skip);
  }

  const ImageShape& shape_;
};

/// Frozen layers, and what reads nothing but what they make: no gradient comes there.
void freeze(ImageLayers& model, const std::string& stage) {
  size_t frozen = 0;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    if (!stage.empty() && stage_of(model.layers[i].name) == stage) frozen = i + 1;
  }
  model.maps[0].constant = true;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const ImageLayer& layer = model.layers[i];
    const auto is_constant = [&](int map) { return model.maps[static_cast<size_t>(map)].constant; };
    const bool learns = layer.parameters > 0 && i >= frozen;
    model.maps[static_cast<size_t>(layer.output)].constant = !learns && std::ranges::all_of(layer.inputs, is_constant);
  }
}

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

bool has_bottleneck(std::string_view name) {
  return is_preresnet(name) ? name == "preresnet164" : is_resnet(name) && name != "resnet18" && name != "resnet34";
}

bool is_preresnet(std::string_view name) { return name.starts_with("preresnet"); }

int64_t widening_of(std::string_view name) { return name == "wide_resnet50_2" ? 2 : 1; }

int64_t width_of(const ImageShape& shape) {
  if (shape.width != 0) return shape.width;
  return shape.name == "densenet161" ? 96 : is_mobile(shape.name) ? 32 : is_preresnet(shape.name) ? 16 : 64;
}

double dropout_of(const ImageShape& shape) {
  const bool deeplab = shape.name.starts_with("deeplabv3");
  if (is_segmentation_model(shape.name)) return shape.dropout.value_or(deeplab ? kDeepLabDropout : kFcnDropout);
  return shape.dropout.value_or(shape.name.starts_with("vgg") ? kVggDropout : is_mobile(shape.name) ? kMobileDropout : 0);
}

double stochastic_depth_of(const ImageShape& shape) {
  return shape.name == "efficientnet_b0" ? shape.stochastic_depth.value_or(kEfficientDepth) : 0;
}

std::string stage_of(const std::string& layer) {
  const size_t first = layer.find('.');
  return layer.substr(0, layer.starts_with("features.") || layer.starts_with("backbone.") ? layer.find('.', first + 1) : first);
}

std::vector<std::string> freezable_stages(const ImageShape& shape) {
  std::vector<std::string> stages;
  ImageShape own;
  own.name = shape.name;
  const int64_t least = least_side(own);
  for (const ImageLayer& layer : layers_of(own, least, least).layers) {
    const std::string stage = stage_of(layer.name);
    const bool classifies = stage == "fc" || stage == "classifier" || stage == "aux_classifier";
    if (layer.parameters > 0 && !classifies && std::ranges::find(stages, stage) == stages.end()) stages.push_back(stage);
  }
  return stages;
}

bool wants_small_stem(int64_t height, int64_t width) { return height <= kSmall && width <= kSmall; }

int64_t least_side(const ImageShape& shape) {
  const auto stages = static_cast<int64_t>(stages_of(shape.name).size());
  if (shape.name.starts_with("vgg")) return int64_t{1} << stages;                                         // halved after each stage
  if (is_resnet(backbone_of(shape.name)) || is_preresnet(shape.name) || is_mobile(shape.name)) return 1;  // every window is padded
  const int64_t first = int64_t{1} << (stages - 1);                                                       // DenseNet: halved between stages
  return shape.small_stem ? first : 4 * (first - 1) + 1;  // its large stem halves twice, and rounds up
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

namespace {

void check_depth(const ImageShape& shape, const char* op) {
  const double p = shape.stochastic_depth.value_or(0);
  if (!(p >= 0 && p < 1)) fail(op, "stochastic depth must be at least 0 and less than 1", p);
  if (p > 0 && shape.name != "efficientnet_b0") fail(op, "stochastic depth must be 0 for " + shape.name, p);
}

void check_freeze(const ImageShape& shape, const char* op) {
  const std::vector<std::string> stages = freezable_stages(shape);
  if (std::ranges::find(stages, shape.freeze) != stages.end()) return;
  std::string names;
  for (const std::string& stage : stages) names += (names.empty() ? "" : ", ") + stage;
  fail(op, "a stage of " + shape.name + " to freeze must be one of " + names, "'" + shape.freeze + "'");
}

}  // namespace

void validate(const ImageShape& shape, const char* op) {
  if (shape.aux && !is_segmentation_model(shape.name)) fail(op, "an auxiliary head is for segmentation", shape.name);
  if (!is_image_model(shape.name) && !is_segmentation_model(shape.name)) {
    std::string names;
    for (const std::string_view name : kNames) names += (names.empty() ? "" : ", ") + std::string(name);
    fail(op, "an image model must be one of " + names, "'" + shape.name + "'");
  }
  check_within(op, "classes", shape.classes, kMostClasses, "2^24");
  check_within(op, "channels", shape.channels, kMostWidth, "4096");
  check_within(op, "width", width_of(shape), kMostWidth, "4096");
  if (shape.name.starts_with("densenet") && shape.width % 2 != 0) fail(op, "width must be even for " + shape.name, shape.width);
  const double dropout = dropout_of(shape);
  if (!(dropout >= 0 && dropout < 1)) fail(op, "dropout must be at least 0 and less than 1", dropout);
  check_depth(shape, op);
  if (!shape.freeze.empty()) check_freeze(shape, op);
}

ImageLayers layers_of(const ImageShape& given, int64_t height, int64_t width) {
  validate(given, kOp);
  check_side(given, height, width, kOp);
  ImageShape shape = given;
  shape.width = width_of(given);
  ImageLayers model = Layers(shape, height, width).take();
  freeze(model, shape.freeze);
  return model;
}

}  // namespace satchel
