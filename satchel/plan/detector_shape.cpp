#include "satchel/plan/detector_shape.h"

#include <algorithm>
#include <array>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/plan/image_shape.h"
#include "satchel/plan/image_step.h"

namespace satchel {
namespace {

constexpr const char* kOp = "plan";
constexpr std::array<std::string_view, 2> kNames = {"retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn"};
constexpr std::string_view kBody = "resnet50";
constexpr int64_t kAnchors = 9, kRegionAnchors = 3;  // of a place, RetinaNet and Faster R-CNN
constexpr int64_t kPooled = 7, kHidden = 1024;       // Faster R-CNN: side of what is read of a box; width of its layers
constexpr int64_t kTower = 4;                        // convolutions of a head

/// Layers in the order of the forward pass, as models/detection.h makes them. Each call gives the map it makes.
class DetectorLayers {
 public:
  DetectorLayers(const DetectorShape& shape, int64_t height, int64_t width) : shape_(shape) {
    list_.maps.push_back({shape.channels, height, width});
    const std::array<int, 4> stages = body();
    has_regions(shape.name) ? proposals(stages) : retinanet(stages);
  }
  ImageLayers take() { return std::move(list_); }

 private:
  int add(LayerKind kind, const std::string& name, std::vector<int> inputs, const ImageMap& out, int64_t window = 1, bool relu = false) {
    list_.maps.push_back(out);
    ImageLayer layer;
    layer.kind = kind;
    layer.name = name;
    layer.inputs = std::move(inputs);
    layer.output = static_cast<int>(list_.maps.size()) - 1;
    layer.relu = relu;
    layer.window = window;
    if (!frozen_) list_.layers.push_back(layer);
    return layer.output;
  }
  const ImageMap& map(int i) const { return list_.maps[static_cast<size_t>(i)]; }

  /// Padded by half of its window.
  int conv(const std::string& name, int x, int64_t channels, int64_t window, int64_t stride = 1) {
    const ImageMap in = map(x);
    const auto side = [&](int64_t n) { return (n + window / 2 * 2 - window) / stride + 1; };
    return add(LayerKind::conv, name, {x}, {channels, side(in.height), side(in.width)}, window);
  }
  int relu(const std::string& name, int x) { return add(LayerKind::relu, name, {x}, map(x), 1, true); }
  int sum(const std::string& name, int x, int y) { return add(LayerKind::concat, name, {x, y}, map(x)); }  // keeps nothing, as a concat

  int norm(const std::string& name, int x, bool relus, int skip = -1) {
    if (!shape_.frozen_norm) {
      std::vector<int> inputs = {x};
      if (skip >= 0) inputs.push_back(skip);
      return add(LayerKind::norm, name, std::move(inputs), map(x), 1, relus);
    }
    const int y = add(LayerKind::norm, name, {x}, map(x), 1, relus && skip < 0);
    if (!frozen_) list_.layers.back().frozen_norm = true;
    return skip < 0 ? y : relu(name, sum(name, y, skip));
  }

  /// The maps that the four stages give.
  std::array<int, 4> body() {
    const std::string at = "backbone.body.";
    frozen_ = shape_.trainable < 5;
    int x = norm(at + "bn1", conv(at + "conv1", 0, shape_.width, 7, 2), true);
    const auto half = [](int64_t n) { return (n - 1) / 2 + 1; };
    x = add(LayerKind::max_pool, at + "maxpool", {x}, {map(x).channels, half(map(x).height), half(map(x).width)}, 3);
    const auto depths = stages_of(kBody);
    std::array<int, 4> made{};
    for (size_t s = 0; s < depths.size(); ++s) {
      frozen_ = static_cast<int>(s) < 4 - shape_.trainable;
      for (int64_t b = 0; b < depths[s]; ++b)
        x = block(at + "layer" + std::to_string(s + 1) + "." + std::to_string(b) + ".", x, shape_.width << s, b == 0 && s > 0 ? 2 : 1);
      made[s] = x;
    }
    frozen_ = false;
    return made;
  }

  int block(const std::string& at, int x, int64_t planes, int64_t stride) {
    int h = norm(at + "bn1", conv(at + "conv1", x, planes, 1), true);
    h = norm(at + "bn2", conv(at + "conv2", h, planes, 3, stride), true);
    int skip = x;
    if (stride != 1 || map(x).channels != planes * kExpansion)
      skip = norm(at + "downsample.1", conv(at + "downsample.0", x, planes * kExpansion, 1, stride), false);
    return norm(at + "bn3", conv(at + "conv3", h, planes * kExpansion, 1), true, skip);
  }

  /// Maps of the pyramid over the stages from `first` on, the largest first.
  std::vector<int> pyramid(const std::array<int, 4>& stages, size_t first) {
    const std::string at = "backbone.fpn.";
    const int64_t channels = kExpansion * shape_.width;
    std::vector<int> maps(stages.size() - first);
    int above = -1;
    for (size_t i = maps.size(); i-- > 0;) {
      const int lateral = conv(at + "inner_blocks." + std::to_string(i) + ".0", stages[first + i], channels, 1);
      above = above < 0 ? lateral : sum(at + "sum", lateral, above);
      maps[i] = conv(at + "layer_blocks." + std::to_string(i) + ".0", above, channels, 3);
    }
    return maps;
  }

  void retinanet(const std::array<int, 4>& stages) {
    std::vector<int> maps = pyramid(stages, 1);
    const std::string at = "backbone.fpn.extra_blocks.";
    const int64_t channels = kExpansion * shape_.width;
    maps.push_back(conv(at + "p6", maps.back(), channels, 3, 2));
    maps.push_back(conv(at + "p7", relu(at + "p6 relu", maps.back()), channels, 3, 2));
    for (size_t i = 0; i < maps.size(); ++i) {
      const std::string level = " P" + std::to_string(i + 3);
      const auto head = [&](const std::string& name, const std::string& last, int64_t out) {
        int x = maps[i];
        for (int64_t c = 0; c < kTower; ++c) {
          const std::string of = "head." + name + ".conv." + std::to_string(c);
          x = relu(of + ".1" + level, conv(of + ".0" + level, x, channels, 3));
        }
        conv("head." + name + "." + last + level, x, out, 3);
      };
      head("classification_head", "cls_logits", kAnchors * shape_.classes);
      head("regression_head", "bbox_reg", kAnchors * 4);
    }
  }

  /// The first half of Faster R-CNN.
  void proposals(const std::array<int, 4>& stages) {
    std::vector<int> maps = pyramid(stages, 0);
    const ImageMap last = map(maps.back());
    const auto half = [](int64_t n) { return (n + 1) / 2; };
    maps.push_back(add(LayerKind::concat, "backbone.fpn.pool", {maps.back()}, {last.channels, half(last.height), half(last.width)}));
    for (size_t i = 0; i < maps.size(); ++i) {
      const std::string level = " P" + std::to_string(i + 2), at = "rpn.head.";
      const int x = relu(at + "conv.0.1" + level, conv(at + "conv.0.0" + level, maps[i], kExpansion * shape_.width, 3));
      conv(at + "cls_logits" + level, x, kRegionAnchors, 1);
      conv(at + "bbox_pred" + level, x, kRegionAnchors * 4, 1);
    }
  }

  const DetectorShape& shape_;
  ImageLayers list_;
  bool frozen_ = false;  // stages at work have no gradients: their layers keep nothing, and are not listed
};

}  // namespace

std::span<const std::string_view> detector_names() { return kNames; }

bool is_detector(std::string_view name) { return std::ranges::find(kNames, name) != kNames.end(); }

bool has_regions(std::string_view name) { return name.starts_with("fasterrcnn"); }

void validate(const DetectorShape& s, const char* op) {
  constexpr int64_t kMostWidth = 1 << 10, kMostClasses = 1 << 16;
  if (!is_detector(s.name)) {
    std::string names;
    for (const std::string_view name : kNames) names += (names.empty() ? "" : ", ") + std::string(name);
    fail(op, "a detector must be one of " + names, "'" + s.name + "'");
  }
  const auto check = [&](const char* what, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most)
      fail(op, std::string(what) + " must be " + std::to_string(least) + " to " + std::to_string(most), value);
  };
  check("classes", s.classes, has_regions(s.name) ? 2 : 1, kMostClasses);
  check("channels", s.channels, 1, kMostWidth);
  check("width", s.width, 1, kMostWidth);
  check("stages to train", s.trainable, 0, 5);
}

std::vector<SavedTensor> plan_detector(const DetectorShape& shape, const BatchShape& batch, const Method& method) {
  validate(shape, kOp);
  validate(method, kOp);
  if (budget_of(method) > 0) fail(kOp, "a budget is for image classifiers", method.name);
  if (batch.images < 1 || batch.images > kMostBatch) fail(kOp, "a batch must have 1 to 2^20 images", batch.images);
  if (batch.height < 1 || batch.width < 1 || batch.height > (1 << 14) || batch.width > (1 << 14))
    fail(kOp, "images must be at most 16384 × 16384", std::to_string(batch.height) + " × " + std::to_string(batch.width));
  const ImageLayers layers = DetectorLayers(shape, batch.height, batch.width).take();
  std::vector<SavedTensor> lines;
  for (const auto& layer : saves_by_layer(layers, batch, method)) lines.insert(lines.end(), layer.begin(), layer.end());
  return lines;
}

std::vector<SavedTensor> plan_regions(const DetectorShape& shape, int64_t boxes, const Method& method, bool half) {
  validate(shape, kOp);
  validate(method, kOp);
  if (!has_regions(shape.name)) fail(kOp, "boxes are planned for fasterrcnn_resnet50_fpn", shape.name);
  if (boxes < 1 || boxes > kRegions * kMostBatch) fail(kOp, "boxes must be 1 to 2^29", boxes);
  const std::string at = "roi_heads.";
  const int64_t read = kExpansion * shape.width * kPooled * kPooled, hidden = kHidden * shape.width / 64;
  ImageLayers list;
  list.maps = {{read, 1, 1, true}};
  const auto add = [&](LayerKind kind, const std::string& name, int input, int64_t out) {
    list.maps.push_back({out, 1, 1, true});
    ImageLayer layer;
    layer.kind = kind;
    layer.name = at + name;
    layer.inputs = {input};
    layer.output = static_cast<int>(list.maps.size()) - 1;
    layer.relu = kind == LayerKind::relu;
    list.layers.push_back(layer);
    return layer.output;
  };
  int x = 0;
  for (const char* name : {"box_head.fc6", "box_head.fc7"})
    x = add(LayerKind::relu, std::string(name) + " relu", add(LayerKind::linear, name, x, hidden), hidden);
  add(LayerKind::linear, "box_predictor.cls_score", x, shape.classes);
  add(LayerKind::linear, "box_predictor.bbox_pred", x, 4 * shape.classes);
  BatchShape batch;
  batch.images = boxes;
  batch.half = half;
  std::vector<SavedTensor> lines;
  for (const auto& layer : saves_by_layer(list, batch, method)) lines.insert(lines.end(), layer.begin(), layer.end());
  return lines;
}

}  // namespace satchel
