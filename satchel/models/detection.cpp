#include "satchel/models/detection.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/upsample_nearest2d.h>
#include <torch/nn/init.h>

#include <cmath>
#include <memory>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"
#include "satchel/models/faster_rcnn.h"

namespace satchel {
namespace {

constexpr const char* kDetector = "detector";
constexpr double kHeadDeviation = 0.01;  // of first weights at torchvision's width

torch::nn::Conv2dOptions same_size(int64_t in, int64_t out, int64_t window, int64_t stride = 1) {
  return torch::nn::Conv2dOptions(in, out, window).stride(stride).padding(window / 2);
}

/// As torchvision: He's normal numbers by what they give in the ResNet, uniform ones in the pyramid, small normal ones in heads.
void initialise_detector(DetectorImpl& model) {
  const at::NoGradGuard no_grad;
  // Narrower heads have larger weights, so that what they make is as large.
  const double head = kHeadDeviation * std::sqrt(64.0 / static_cast<double>(model.options().width));
  for (const auto& item : model.named_modules("", false)) {
    auto* conv = item.value()->as<nn::Conv2d>();
    if (conv == nullptr) continue;
    if (item.key().starts_with("backbone.body.")) {
      torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
    } else if (item.key().starts_with("backbone.fpn.")) {
      torch::nn::init::kaiming_uniform_(conv->weight, 1);
    } else {
      torch::nn::init::normal_(conv->weight, 0, head);
    }
    if (conv->bias.defined()) torch::nn::init::zeros_(conv->bias);
  }
}

}  // namespace

DetectorShape shape_of(const DetectorOptions& o) { return {o.name, o.classes, o.channels, o.width, o.frozen_norm, o.trainable}; }

SavePolicy DetectorImpl::saving(const std::string& name) const { return {options_.saving.method, name, options_.saving.allocator}; }

void DetectorImpl::check_images(const at::Tensor& x) const {
  if (!x.defined()) fail(kDetector, "images must be a tensor", "none");
  if (x.dim() != 4) fail(kDetector, "images must have four dimensions, batch × channels × height × width", x.sizes());
  if (x.size(1) != options_.channels) fail(kDetector, "images must have " + std::to_string(options_.channels) + " channels", x.sizes());
}

at::Tensor conv_at_level(const nn::Conv2d& c, const at::Tensor& x, const std::string& level) {
  const int64_t border = (*c->options.kernel_size())[0] / 2, stride = (*c->options.stride())[0];
  SavePolicy saving = c->saving;
  saving.name += " " + level;
  return conv(x, c->weight, c->bias, {{stride}, {border}, {1}, {0}, false, 1}, saving);
}

ConvTowerImpl::ConvTowerImpl(int64_t channels, int64_t count, const SavePolicy& saving) : saving_(saving) {
  for (int64_t i = 0; i < count; ++i) {
    const std::string number = std::to_string(i);
    convs_.emplace_back(same_size(channels, channels, 3), SavePolicy{saving.method, saving.name + "." + number + ".0", saving.allocator});
    const auto pair = register_module(number, torch::nn::Sequential());
    pair->push_back(convs_.back());
  }
}

at::Tensor ConvTowerImpl::forward(at::Tensor x, const std::string& level) {
  for (size_t i = 0; i < convs_.size(); ++i)
    x = relu(conv_at_level(convs_[i], x, level),
             {saving_.method, saving_.name + "." + std::to_string(i) + ".1 " + level, saving_.allocator});
  return x;
}

PyramidBackboneImpl::PyramidBackboneImpl(const DetectorOptions& o, int first, PyramidTop top)
    : saving_(o.saving), channels_(o.width * kExpansion), top_(top) {
  ResNetBodyOptions body;
  body.name = "resnet50";
  body.channels = o.channels;
  body.width = o.width;
  body.saving = {o.saving.method, "backbone.body.", o.saving.allocator};
  body.frozen_norm = o.frozen_norm;
  body.trainable = o.trainable;
  body_ = register_module("body", ResNetBody(body));
  const auto fpn = register_module("fpn", std::make_shared<torch::nn::Module>());
  const auto inner = fpn->register_module("inner_blocks", std::make_shared<torch::nn::Module>());
  const auto layer = fpn->register_module("layer_blocks", std::make_shared<torch::nn::Module>());
  for (int stage = first; stage <= 4; ++stage) {
    const std::string number = std::to_string(stages_.size());
    stages_.push_back(stage);
    inner_.push_back(add_conv(*inner, "inner_blocks.", number, same_size(body_->channels_of(stage), channels_, 1)));
    layer_.push_back(add_conv(*layer, "layer_blocks.", number, same_size(channels_, channels_, 3)));
  }
  if (top != PyramidTop::convolutions) return;
  const auto extra = fpn->register_module("extra_blocks", std::make_shared<torch::nn::Module>());
  const auto last = [&](const std::string& name) {
    const SavePolicy how = {o.saving.method, "backbone.fpn.extra_blocks." + name, o.saving.allocator};
    return extra->register_module(name, nn::Conv2d(same_size(channels_, channels_, 3, 2), how));
  };
  p6_ = last("p6");
  p7_ = last("p7");
}

nn::Conv2d PyramidBackboneImpl::add_conv(torch::nn::Module& to, const std::string& list, const std::string& name,
                                         const torch::nn::Conv2dOptions& options) {
  nn::Conv2d made(options, SavePolicy{saving_.method, "backbone.fpn." + list + name + ".0", saving_.allocator});
  to.register_module(name, torch::nn::Sequential())->push_back(made);
  return made;
}

/// The sum with the map above it, each of whose places stands for several: nothing is kept.
at::Tensor PyramidBackboneImpl::up_add(const at::Tensor& above, at::Tensor lateral) const {
  const NoAutocast no_autocast;
  return lateral.add_(at::upsample_nearest2d(above, lateral.sizes().slice(2)));
}

std::vector<at::Tensor> PyramidBackboneImpl::forward(const at::Tensor& images) {
  std::vector<at::Tensor> maps = body_->stages(images, stages_);
  at::Tensor above;
  for (size_t i = maps.size(); i-- > 0;) {
    at::Tensor lateral = inner_[i]->forward(maps[i]);
    above = above.defined() ? up_add(above, std::move(lateral)) : std::move(lateral);
    maps[i] = layer_[i]->forward(above);
  }
  if (top_ == PyramidTop::pool) {
    maps.push_back(maps.back().slice(2, 0, maps.back().size(2), 2).slice(3, 0, maps.back().size(3), 2));
    return maps;
  }
  maps.push_back(p6_->forward(maps.back()));
  maps.push_back(p7_->forward(relu(maps.back(), {saving_.method, "backbone.fpn.extra_blocks.p6 relu", saving_.allocator})));
  return maps;
}

Detector make_detector(const DetectorOptions& options) {
  validate(shape_of(options), kDetector);
  validate(options.saving.method, kDetector);
  if (budget_of(options.saving.method) > 0) fail(kDetector, "a budget is for image classifiers", options.saving.method.name);
  const auto made = [&]() -> std::shared_ptr<DetectorImpl> {
    if (has_regions(options.name)) return std::make_shared<FasterRcnnImpl>(options);
    return std::make_shared<RetinaNetImpl>(options);
  };
  Detector model(made());
  initialise_detector(*model);
  if (auto* retinanet = dynamic_cast<RetinaNetImpl*>(model.get())) retinanet->start_with_background();
  for (at::Tensor& p : model->parameters()) {
    if (p.dim() == 4) p.set_data(p.contiguous(at::MemoryFormat::ChannelsLast));
  }
  return model;
}

}  // namespace satchel
