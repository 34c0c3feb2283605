#include "satchel/models/faster_rcnn.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/smooth_l1_loss.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/roi_align.h"

namespace satchel {
namespace {

// torchvision's.
constexpr int64_t kProposalCandidates = 2000, kTestCandidates = 1000;  // of a level, before and of an image after suppression
constexpr double kProposalOverlap = 0.7, kLeastSide = 1e-3;
constexpr double kAnchorHigh = 0.7, kAnchorLow = 0.3, kRegionHigh = 0.5, kRegionLow = 0.5;
constexpr int64_t kAnchorSamples = 256;
constexpr double kAnchorShare = 0.5, kRegionShare = 0.25;  // of samples that may be of objects
constexpr double kSmooth = 1.0 / 9;
constexpr double kLeastRegionScore = 0.05, kRegionOverlap = 0.5, kLeastRegionSide = 1e-2;
constexpr int64_t kPooledSide = 7, kRoiSamples = 2, kHiddenWidth = 1024;
constexpr double kUsualSide = 224;  // of a box that the level of stride 16 reads
const std::vector<double> kRegionShapes = {0.5, 1.0, 2.0};
constexpr size_t kRegionLevels = 4;  // those with a map of their own; the fifth is for proposals alone

/// Rows of `labels` to train on: at most `share` of `count` with a label of 1 or more, filled up with those of 0. Drawn from the generator.
at::Tensor sampled_rows(const at::Tensor& labels, int64_t count, double share, const at::Generator& generator) {
  const at::Tensor on = labels.ge(1).nonzero().squeeze(1), off = labels.eq(0).nonzero().squeeze(1);
  const int64_t some = std::min(on.size(0), static_cast<int64_t>(static_cast<double>(count) * share));
  const int64_t rest = std::min(off.size(0), count - some);
  const auto draw = [&](const at::Tensor& from, int64_t n) {
    const at::Tensor order = at::randperm(from.size(0), generator, at::TensorOptions().dtype(at::kLong)).slice(0, 0, n);
    return from.index_select(0, order.to(from.device()));
  };
  return at::cat({draw(on, some), draw(off, rest)});
}

/// Boxes with both sides at least so long.
at::Tensor large_rows(const at::Tensor& boxes, double side) {
  const at::Tensor size = boxes.slice(1, 2, 4) - boxes.slice(1, 0, 2);
  return size.ge(side).all(1).nonzero().squeeze(1);
}

at::Tensor level_rows(const at::Tensor& map, int64_t values) {
  return map.permute({0, 2, 3, 1}).reshape({map.size(0), -1, values}).to(at::kFloat);
}

at::Tensor all_rows(const std::vector<at::Tensor>& maps, int64_t values) {
  std::vector<at::Tensor> rows;
  for (const at::Tensor& map : maps) rows.push_back(level_rows(map, values));
  return at::cat(rows, 1);
}

}  // namespace

FasterRcnnImpl::FasterRcnnImpl(const DetectorOptions& o) : DetectorImpl(o) {
  backbone_ = register_module("backbone", PyramidBackbone(o, 1, PyramidTop::pool));
  const int64_t channels = backbone_->channels(), anchors = static_cast<int64_t>(kRegionShapes.size());
  const auto part = [](torch::nn::Module& to, const std::string& name) {
    return to.register_module(name, std::make_shared<torch::nn::Module>());
  };
  const auto head = part(*register_module("rpn", std::make_shared<torch::nn::Module>()), "head");
  rpn_conv_ = head->register_module("conv", ConvTower(channels, 1, saving("rpn.head.conv")));
  const auto map = [&](const std::string& name, int64_t out) {
    return head->register_module(name, nn::Conv2d(torch::nn::Conv2dOptions(channels, out, 1), saving("rpn.head." + name)));
  };
  rpn_logits_ = map("cls_logits", anchors);
  rpn_boxes_ = map("bbox_pred", anchors * 4);
  const auto regions = register_module("roi_heads", std::make_shared<torch::nn::Module>());
  const auto box_head = part(*regions, "box_head"), predictor = part(*regions, "box_predictor");
  const auto linear = [&](torch::nn::Module& to, const std::string& at, const std::string& name, int64_t in, int64_t out) {
    // Rows are boxes, not images: their bits are not allocated with the images'.
    const SavePolicy how = {o.saving.method, "roi_heads." + at + "." + name, {}};
    return to.register_module(name, nn::Linear(torch::nn::LinearOptions(in, out), how));
  };
  const int64_t hidden = kHiddenWidth * o.width / 64;
  fc6_ = linear(*box_head, "box_head", "fc6", channels * kPooledSide * kPooledSide, hidden);
  fc7_ = linear(*box_head, "box_head", "fc7", hidden, hidden);
  class_score_ = linear(*predictor, "box_predictor", "cls_score", hidden, o.classes);
  box_pred_ = linear(*predictor, "box_predictor", "bbox_pred", hidden, 4 * o.classes);
  for (const double size : {32.0, 64.0, 128.0, 256.0, 512.0}) base_.push_back(base_anchors({size}, kRegionShapes));
}

FasterRcnnImpl::Maps FasterRcnnImpl::maps_of(const at::Tensor& images) {
  check_images(images);
  Maps maps;
  maps.features = backbone_->forward(images);
  for (size_t i = 0; i < maps.features.size(); ++i) {
    const std::string level = "P" + std::to_string(i + 2);
    const at::Tensor x = rpn_conv_->forward(maps.features[i], level);
    maps.objectness.push_back(conv_at_level(rpn_logits_, x, level));
    maps.codes.push_back(conv_at_level(rpn_boxes_, x, level));
  }
  return maps;
}

std::vector<at::Tensor> FasterRcnnImpl::anchors_of(const at::Tensor& images, const std::vector<at::Tensor>& maps) const {
  std::vector<at::Tensor> anchors;
  for (size_t i = 0; i < base_.size(); ++i) {
    const int64_t height = maps[i].size(2), width = maps[i].size(3);
    anchors.push_back(grid_anchors(base_[i].to(images.device()), height, width, {images.size(2) / height, images.size(3) / width}));
  }
  return anchors;
}

std::vector<at::Tensor> FasterRcnnImpl::proposals_of(const Maps& maps, const at::Tensor& images,
                                                     const std::vector<std::array<int64_t, 2>>& sizes, int64_t candidates,
                                                     int64_t most) const {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> anchors = anchors_of(images, maps.objectness);
  std::vector<at::Tensor> proposals;
  for (int64_t n = 0; n < images.size(0); ++n) {
    std::vector<at::Tensor> boxes, scores, levels;
    for (size_t i = 0; i < anchors.size(); ++i) {
      const at::Tensor logits = level_rows(maps.objectness[i].detach().narrow(0, n, 1), 1).flatten();
      const auto [top, at] = logits.topk(std::min(candidates, logits.size(0)));
      const at::Tensor codes = level_rows(maps.codes[i].detach().narrow(0, n, 1), 4).select(0, 0).index_select(0, at);
      boxes.push_back(decode_boxes(codes, anchors[i].index_select(0, at)));
      scores.push_back(top);
      levels.push_back(at::full_like(at, static_cast<int64_t>(i)));
    }
    const auto [height, width] = sizes[static_cast<size_t>(n)];
    const at::Tensor clipped = clip_boxes(at::cat(boxes), height, width), large = large_rows(clipped, kLeastSide);
    const at::Tensor own = clipped.index_select(0, large);
    const at::Tensor stay = suppress(own, at::cat(scores).index_select(0, large), at::cat(levels).index_select(0, large), kProposalOverlap);
    proposals.push_back(own.index_select(0, stay.slice(0, 0, most)));
  }
  return proposals;
}

std::pair<at::Tensor, at::Tensor> FasterRcnnImpl::heads_of(const Maps& maps, const at::Tensor& images, const Regions& regions) {
  // A box is read from the map whose stride suits its size.
  const at::Tensor size = regions.boxes.slice(1, 2, 4) - regions.boxes.slice(1, 0, 2);
  const at::Tensor side = (size.select(1, 0) * size.select(1, 1)).sqrt();
  const at::Tensor level = ((side / kUsualSide).log2() + 4 + 1e-6).floor().clamp(2, 2 + kRegionLevels - 1).to(at::kLong) - 2;
  std::vector<at::Tensor> parts, order;
  for (size_t i = 0; i < kRegionLevels; ++i) {
    const at::Tensor rows = level.eq(static_cast<int64_t>(i)).nonzero().squeeze(1), &map = maps.features[i];
    RoiAlignOptions o;
    o.size = kPooledSide;
    o.samples = kRoiSamples;
    o.scale = std::exp2(std::round(std::log2(static_cast<double>(map.size(2)) / static_cast<double>(images.size(2)))));
    parts.push_back(roi_align(map, regions.boxes.index_select(0, rows), regions.image.index_select(0, rows), o,
                              "roi_heads.box_roi_pool P" + std::to_string(i + 2)));
    order.push_back(rows);
  }
  const at::Tensor back = at::cat(order).argsort();
  const at::Tensor x = at::cat(parts).index_select(0, back).flatten(1);
  const auto rows_relu = [&](const at::Tensor& y, const char* name) {
    return relu(y, {options().saving.method, std::string("roi_heads.box_head.") + name + " relu", {}});
  };
  const at::Tensor h = rows_relu(fc7_->forward(rows_relu(fc6_->forward(x), "fc6")), "fc7");
  return {class_score_->forward(h), box_pred_->forward(h)};
}

DetectorOutputs FasterRcnnImpl::forward(const at::Tensor& images, const BoxTargets& targets) {
  // First, so that methods which draw more seeds choose the same boxes.
  const at::Tensor seed = fresh_seed(at::kCPU);
  const at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed.item<int64_t>()));
  Maps maps = maps_of(images);
  Regions regions;
  std::vector<at::Tensor> chosen, image, labels, boxes;
  {
    const at::NoGradGuard no_grad;
    const auto proposals = proposals_of(maps, images, targets.image_sizes, kProposalCandidates, kProposalCandidates);
    for (size_t n = 0; n < proposals.size(); ++n) {
      const at::Tensor& own = targets.boxes[n];
      const at::Tensor all = at::cat({proposals[n], own});
      const at::Tensor match = match_anchors(overlaps(own, all), kRegionHigh, kRegionLow, /*reaches_all=*/false);
      at::Tensor label = at::zeros_like(match), wanted = all;
      if (own.size(0) > 0) {
        label = at::where(match.ge(0), targets.labels[n].index_select(0, match.clamp_min(0)), label);
        wanted = own.index_select(0, match.clamp_min(0));
      }
      const at::Tensor rows = sampled_rows(label, kRegions, kRegionShare, generator);
      chosen.push_back(all.index_select(0, rows));
      image.push_back(at::full({rows.size(0)}, static_cast<int64_t>(n), rows.options()));
      labels.push_back(label.index_select(0, rows));
      boxes.push_back(encode_boxes(wanted.index_select(0, rows), chosen.back(), kRegionCode));
    }
    regions = {at::cat(chosen), at::cat(image)};
  }
  auto [logits, codes] = heads_of(maps, images, regions);
  DetectorOutputs outputs;
  outputs.maps = std::move(maps.objectness);
  outputs.maps.insert(outputs.maps.end(), maps.codes.begin(), maps.codes.end());
  outputs.maps.push_back(std::move(logits));
  outputs.maps.push_back(std::move(codes));
  outputs.fixed = {seed, at::cat(labels), at::cat(boxes)};
  return outputs;
}

at::Tensor FasterRcnnImpl::loss(DetectorOutputs outputs, const at::Tensor& images, const BoxTargets& targets) {
  const auto middle = outputs.maps.begin() + static_cast<std::ptrdiff_t>(base_.size());
  const std::vector<at::Tensor> objectness(outputs.maps.begin(), middle), codes(middle, middle + static_cast<std::ptrdiff_t>(base_.size()));
  const at::Tensor logits = outputs.maps[2 * base_.size()].to(at::kFloat), region_codes = outputs.maps.back().to(at::kFloat);
  const at::Tensor labels = outputs.fixed[1], wanted = outputs.fixed[2];
  const auto seed = static_cast<uint64_t>(outputs.fixed[0].item<int64_t>());
  outputs = {};

  // Proposals: is there an object, and where, of some anchors of each image.
  const at::Generator generator = at::detail::createCPUGenerator(seed + 1);
  std::vector<at::Tensor> rows, on_rows, on_labels, on_boxes;
  {
    const at::NoGradGuard no_grad;
    const at::Tensor anchors = at::cat(anchors_of(images, objectness));
    for (size_t n = 0; n < targets.boxes.size(); ++n) {
      const at::Tensor& own = targets.boxes[n];
      const at::Tensor match = match_anchors(overlaps(own, anchors), kAnchorHigh, kAnchorLow, /*reaches_all=*/true);
      const at::Tensor label = at::where(match.ge(0), at::full_like(match, 1), at::where(match.eq(-1), at::zeros_like(match), match));
      const at::Tensor chosen = sampled_rows(label, kAnchorSamples, kAnchorShare, generator), value = label.index_select(0, chosen);
      const at::Tensor on = chosen.index_select(0, value.nonzero().squeeze(1));
      const int64_t first = static_cast<int64_t>(n) * anchors.size(0);
      rows.push_back(chosen + first);
      on_labels.push_back(value.to(at::kFloat));
      on_rows.push_back(on + first);
      if (own.size(0) > 0) on_boxes.push_back(encode_boxes(own.index_select(0, match.index_select(0, on)), anchors.index_select(0, on)));
    }
  }
  const at::Tensor chosen = at::cat(rows), all_objectness = all_rows(objectness, 1).flatten(), all_codes = all_rows(codes, 4).view({-1, 4});
  const at::Tensor object_loss = at::binary_cross_entropy_with_logits(all_objectness.index_select(0, chosen), at::cat(on_labels));
  const at::Tensor on_codes = all_codes.index_select(0, at::cat(on_rows));
  const at::Tensor aims = on_boxes.empty() ? at::zeros_like(on_codes) : at::cat(on_boxes);
  const at::Tensor place_loss = at::smooth_l1_loss(on_codes, aims, at::Reduction::Sum, kSmooth) / static_cast<double>(chosen.size(0));

  // Regions: a class, and of objects the box that their class has.
  const at::Tensor class_loss = at::cross_entropy_loss(logits, labels);
  const at::Tensor on = labels.ge(1).nonzero().squeeze(1), of_class = labels.index_select(0, on);
  const at::Tensor own = region_codes.view({labels.size(0), -1, 4}).index({on, of_class});
  const at::Tensor box_loss =
      at::smooth_l1_loss(own, wanted.index_select(0, on), at::Reduction::Sum, kSmooth) / static_cast<double>(labels.size(0));
  return object_loss + place_loss + class_loss + box_loss;
}

std::vector<Detections> FasterRcnnImpl::detect(const at::Tensor& images, const std::vector<std::array<int64_t, 2>>& sizes, int64_t most) {
  const at::NoGradGuard no_grad;
  const Maps maps = maps_of(images);
  const std::vector<at::Tensor> proposals = proposals_of(maps, images, sizes, kTestCandidates, kTestCandidates);
  std::vector<at::Tensor> image;
  for (size_t n = 0; n < proposals.size(); ++n)
    image.push_back(
        at::full({proposals[n].size(0)}, static_cast<int64_t>(n), at::TensorOptions().dtype(at::kLong).device(images.device())));
  const Regions regions{at::cat(proposals), at::cat(image)};
  const auto [logits, codes] = heads_of(maps, images, regions);
  const int64_t classes = options().classes;
  const at::Tensor scores = at::softmax(logits.to(at::kFloat), 1).slice(1, 1),
                   wide = codes.to(at::kFloat).view({-1, classes, 4}).slice(1, 1);
  std::vector<Detections> found;
  int64_t first = 0;
  for (size_t n = 0; n < proposals.size(); ++n) {
    const int64_t count = proposals[n].size(0);
    const at::Tensor good = scores.narrow(0, first, count).gt(kLeastRegionScore).nonzero();  // region, class − 1
    const at::Tensor region = good.select(1, 0), label = good.select(1, 1);
    const at::Tensor own =
        decode_boxes(wide.narrow(0, first, count).index({region, label}), proposals[n].index_select(0, region), kRegionCode);
    const at::Tensor boxes = clip_boxes(own, sizes[n][0], sizes[n][1]), large = large_rows(boxes, kLeastRegionSide);
    const Detections all{boxes.index_select(0, large), scores.narrow(0, first, count).index({region, label}).index_select(0, large),
                         label.index_select(0, large) + 1};
    const at::Tensor best = suppress(all.boxes, all.scores, all.labels, kRegionOverlap).slice(0, 0, most);
    found.push_back({all.boxes.index_select(0, best), all.scores.index_select(0, best), all.labels.index_select(0, best)});
    first += count;
  }
  return found;
}

}  // namespace satchel
