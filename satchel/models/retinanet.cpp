#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "satchel/autograd/box_loss.h"
#include "satchel/models/detection.h"

namespace satchel {
namespace {

// torchvision's.
constexpr int64_t kTower = 4;                           // convolutions of a head
constexpr double kPrior = 0.01;                         // probability of a class at first
constexpr double kForeground = 0.5, kBackground = 0.4;  // overlaps from and below which an anchor is decided
constexpr double kLeastScore = 0.05, kMostOverlap = 0.5;
constexpr int64_t kCandidates = 1000;  // of a level

/// Three sizes of each of the levels' 32, 64 … 512 pixels, in whole pixels.
std::vector<std::vector<double>> anchor_sizes() {
  std::vector<std::vector<double>> sizes;
  for (const double size : {32.0, 64.0, 128.0, 256.0, 512.0}) {
    sizes.push_back({size, std::floor(size * std::pow(2.0, 1.0 / 3)), std::floor(size * std::pow(2.0, 2.0 / 3))});
  }
  return sizes;
}

const std::vector<double> kShapes = {0.5, 1.0, 2.0};

/// What the anchors of one image shall say.
struct ImageTargets {
  at::Tensor labels, boxes, weight;
};

ImageTargets targets_of(const at::Tensor& anchors, const at::Tensor& boxes, const at::Tensor& labels) {
  if (boxes.size(0) == 0) {
    return {at::full({anchors.size(0)}, AnchorTargets::background, labels.options()), at::zeros_like(anchors),
            at::full({}, 1.0, anchors.options())};
  }
  const at::Tensor match = match_anchors(overlaps(boxes, anchors), kForeground, kBackground, /*reaches_all=*/true);
  const at::Tensor own = match.clamp_min(0), on = match.ge(0);
  return {at::where(on, labels.index_select(0, own), match), encode_boxes(boxes.index_select(0, own), anchors),
          1 / on.sum().to(at::kFloat).clamp_min(1)};
}

AnchorTargets targets_of(const at::Tensor& anchors, const BoxTargets& targets) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> labels, boxes, weights;
  for (size_t i = 0; i < targets.boxes.size(); ++i) {
    ImageTargets image = targets_of(anchors, targets.boxes[i], targets.labels[i]);
    labels.push_back(std::move(image.labels));
    boxes.push_back(std::move(image.boxes));
    weights.push_back(std::move(image.weight));
  }
  return {at::stack(labels), at::stack(boxes), at::stack(weights) / static_cast<double>(targets.boxes.size())};
}

}  // namespace

RetinaNetImpl::RetinaNetImpl(const DetectorOptions& o) : DetectorImpl(o) {
  backbone_ = register_module("backbone", PyramidBackbone(o, 2, PyramidTop::convolutions));
  const auto anchors = static_cast<int64_t>(kShapes.size() * anchor_sizes()[0].size()), channels = backbone_->channels();
  const auto head = register_module("head", std::make_shared<torch::nn::Module>());
  const auto part = [&](const std::string& name) { return head->register_module(name, std::make_shared<torch::nn::Module>()); };
  const auto of_classes = part("classification_head"), of_boxes = part("regression_head");
  const auto tower = [&](torch::nn::Module& to, const std::string& at) {
    return to.register_module("conv", ConvTower(channels, kTower, saving("head." + at + ".conv")));
  };
  const auto last = [&](torch::nn::Module& to, const std::string& at, const std::string& name, int64_t out) {
    return to.register_module(name, nn::Conv2d(torch::nn::Conv2dOptions(channels, out, 3).padding(1), saving("head." + at + "." + name)));
  };
  class_tower_ = tower(*of_classes, "classification_head");
  class_logits_ = last(*of_classes, "classification_head", "cls_logits", anchors * o.classes);
  box_tower_ = tower(*of_boxes, "regression_head");
  box_reg_ = last(*of_boxes, "regression_head", "bbox_reg", anchors * 4);
  for (const auto& sizes : anchor_sizes()) base_.push_back(base_anchors(sizes, kShapes));
}

void RetinaNetImpl::start_with_background() {
  const at::NoGradGuard no_grad;
  class_logits_->bias.fill_(-std::log((1 - kPrior) / kPrior));
}

RetinaNetImpl::Maps RetinaNetImpl::maps_of(const at::Tensor& images) {
  check_images(images);
  std::vector<at::Tensor> features = backbone_->forward(images);
  Maps maps;
  for (size_t i = 0; i < features.size(); ++i) {
    const std::string level = "P" + std::to_string(i + 3);
    maps.classes.push_back(conv_at_level(class_logits_, class_tower_->forward(features[i], level), level));
    maps.boxes.push_back(conv_at_level(box_reg_, box_tower_->forward(std::move(features[i]), level), level));
  }
  return maps;
}

std::vector<at::Tensor> RetinaNetImpl::anchors_of(const at::Tensor& images, const std::vector<at::Tensor>& maps) const {
  std::vector<at::Tensor> anchors;
  for (size_t i = 0; i < base_.size(); ++i) {
    const int64_t height = maps[i].size(2), width = maps[i].size(3);
    anchors.push_back(grid_anchors(base_[i].to(images.device()), height, width, {images.size(2) / height, images.size(3) / width}));
  }
  return anchors;
}

DetectorOutputs RetinaNetImpl::forward(const at::Tensor& images, const BoxTargets&) {
  Maps maps = maps_of(images);
  DetectorOutputs outputs{std::move(maps.classes), {}};
  outputs.maps.insert(outputs.maps.end(), std::make_move_iterator(maps.boxes.begin()), std::make_move_iterator(maps.boxes.end()));
  return outputs;
}

at::Tensor RetinaNetImpl::loss(DetectorOutputs outputs, const at::Tensor& images, const BoxTargets& targets) {
  const auto middle = outputs.maps.begin() + static_cast<std::ptrdiff_t>(outputs.maps.size() / 2);
  const std::vector<at::Tensor> classes(outputs.maps.begin(), middle), boxes(middle, outputs.maps.end());
  outputs = {};
  const AnchorTargets wanted = targets_of(at::cat(anchors_of(images, classes)), targets);
  return focal_loss_(classes, options().classes, wanted, {}, saving("classification loss")) +
         box_loss_(boxes, wanted, 0, saving("box loss"));
}

std::vector<Detections> RetinaNetImpl::detect(const at::Tensor& images, const std::vector<std::array<int64_t, 2>>& sizes, int64_t most) {
  const at::NoGradGuard no_grad;
  const Maps maps = maps_of(images);
  const std::vector<at::Tensor> anchors = anchors_of(images, maps.classes);
  const int64_t classes = options().classes;
  std::vector<Detections> found;
  for (int64_t n = 0; n < images.size(0); ++n) {
    const auto [height, width] = sizes[static_cast<size_t>(n)];
    std::vector<at::Tensor> boxes, scores, labels;
    for (size_t i = 0; i < anchors.size(); ++i) {
      const auto rows = [&](const at::Tensor& map, int64_t values) {
        return map.select(0, n).permute({1, 2, 0}).reshape({-1, values}).to(at::kFloat);
      };
      const at::Tensor score = rows(maps.classes[i], classes).sigmoid_().flatten();
      const auto [top, place] = score.topk(std::min(kCandidates, score.size(0)));
      const at::Tensor good = top.gt(kLeastScore).nonzero().squeeze(1), at = place.index_select(0, good);
      const at::Tensor anchor = at.div(classes, "floor");
      scores.push_back(top.index_select(0, good));
      labels.push_back(at.remainder(classes));
      boxes.push_back(
          clip_boxes(decode_boxes(rows(maps.boxes[i], 4).index_select(0, anchor), anchors[i].index_select(0, anchor)), height, width));
    }
    Detections all{at::cat(boxes), at::cat(scores), at::cat(labels)};
    const at::Tensor stay = suppress(all.boxes, all.scores, all.labels, kMostOverlap);
    const at::Tensor best = stay.slice(0, 0, most);
    found.push_back({all.boxes.index_select(0, best), all.scores.index_select(0, best), all.labels.index_select(0, best)});
  }
  return found;
}

}  // namespace satchel
