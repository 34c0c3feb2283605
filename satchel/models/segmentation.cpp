#include "satchel/models/segmentation.h"

#include <ATen/ops/cat.h>
#include <torch/nn/modules/container/modulelist.h>

#include <array>
#include <utility>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/pool.h"
#include "satchel/autograd/resample.h"
#include "satchel/nn/activation.h"
#include "satchel/nn/dropout.h"
#include "satchel/nn/pool.h"

namespace satchel {
namespace {

constexpr std::array<int64_t, 3> kReaches = {12, 24, 36};  // of DeepLabV3's dilated windows

SavePolicy inside(const SavePolicy& saving, const std::string& name) { return {saving.method, saving.name + "." + name, saving.allocator}; }

torch::nn::Conv2dOptions window(int64_t in, int64_t out, int64_t side, int64_t dilation = 1) {
  return torch::nn::Conv2dOptions(in, out, side).padding(side / 2 * dilation).dilation(dilation).bias(false);
}

/// The next three members of a Sequential.
ConvNormRelu add_layer(torch::nn::Sequential& to, const torch::nn::Conv2dOptions& options, const SavePolicy& saving) {
  const auto next = [&] { return inside(saving, std::to_string(to->size())); };
  ConvNormRelu layer;
  layer.conv = nn::Conv2d(options, next());
  to->push_back(layer.conv);
  layer.norm = nn::BatchNorm2d(torch::nn::BatchNormOptions(options.out_channels()), next());
  to->push_back(layer.norm);
  to->push_back(nn::ReLU(torch::nn::ReLUOptions(), next()));
  return layer;
}

at::Tensor resized_to(const at::Tensor& x, const at::Tensor& like, const SavePolicy& saving) {
  return upsample(x, {.size = {like.size(2), like.size(3)}, .scale = {}, .mode = Resample::linear}, saving);
}

}  // namespace

FcnHeadImpl::FcnHeadImpl(int64_t channels, int64_t classes, double dropout, const SavePolicy& saving) : saving_(saving), dropout_(dropout) {
  torch::nn::Sequential all;
  first_ = add_layer(all, window(channels, channels / 4, 3), saving);
  all->push_back(nn::Dropout(torch::nn::DropoutOptions(dropout), inside(saving, "3")));
  last_ = nn::Conv2d(torch::nn::Conv2dOptions(channels / 4, classes, 1), inside(saving, "4"));
  all->push_back(last_);
  for (const auto& layer : all->named_children()) register_module(layer.key(), layer.value());
}

at::Tensor FcnHeadImpl::forward(const at::Tensor& x) {
  return last_->forward(dropout(first_(x), dropout_, is_training(), inside(saving_, "3")));
}

DeepLabHeadImpl::DeepLabHeadImpl(int64_t channels, int64_t width, int64_t classes, double dropout, const SavePolicy& saving)
    : saving_(saving), dropout_(dropout) {
  const auto pyramid = register_module("0", std::make_shared<torch::nn::Module>("Pyramid"));
  torch::nn::ModuleList convs;
  const SavePolicy at = inside(saving, "0");
  const auto part = [&](const torch::nn::Conv2dOptions& options, bool averaged) {
    const SavePolicy own = inside(at, "convs." + std::to_string(parts_.size()));
    torch::nn::Sequential layers;
    if (averaged) layers->push_back(nn::AdaptiveAvgPool2d(torch::nn::AdaptiveAvgPool2dOptions({1, 1}), inside(own, "0")));
    parts_.push_back(add_layer(layers, options, own));
    convs->push_back(layers);
  };
  part(window(channels, width, 1), false);
  for (const int64_t reach : kReaches) part(window(channels, width, 3, reach), false);
  part(window(channels, width, 1), true);
  pyramid->register_module("convs", convs);
  torch::nn::Sequential project, all;
  project_ = add_layer(project, window(static_cast<int64_t>(parts_.size()) * width, width, 1), inside(at, "project"));
  project->push_back(nn::Dropout(torch::nn::DropoutOptions(dropout), inside(at, "project.3")));
  pyramid->register_module("project", project);
  const auto add = [&](size_t number, const auto& module) { return register_module(std::to_string(number), module); };
  first_.conv = add(1, nn::Conv2d(window(width, width, 3), inside(saving, "1")));
  first_.norm = add(2, nn::BatchNorm2d(torch::nn::BatchNormOptions(width), inside(saving, "2")));
  add(3, nn::ReLU(torch::nn::ReLUOptions(), inside(saving, "3")));
  last_ = add(4, nn::Conv2d(torch::nn::Conv2dOptions(width, classes, 1), inside(saving, "4")));
}

at::Tensor DeepLabHeadImpl::pyramid(const at::Tensor& x) {
  const SavePolicy at = inside(saving_, "0");
  std::vector<at::Tensor> maps;
  for (size_t i = 0; i + 1 < parts_.size(); ++i) maps.push_back(parts_[i](x));
  const at::Tensor mean = parts_.back()(adaptive_avg_pool(x, {1, 1}, inside(at, "convs.4.0")));
  maps.push_back(resized_to(mean, x, inside(at, "convs.4.upsample")).to(maps[0].scalar_type()));
  return at::cat(maps, 1);
}

at::Tensor DeepLabHeadImpl::forward(const at::Tensor& x) {
  const at::Tensor h = dropout(project_(pyramid(x)), dropout_, is_training(), inside(saving_, "0.project.3"));
  return last_->forward(first_(h));
}

SegmentationImpl::SegmentationImpl(const ImageModelOptions& o)
    : ImageModelImpl(o),
      backbone_(register_module(
          "backbone",
          ResNetBody(ResNetBodyOptions{
              std::string(backbone_of(o.name)), o.channels, o.width, o.small_stem, {false, true, true}, saving("backbone.")}))) {
  const int64_t deep = backbone_->channels_of(4);
  const double dropout = dropout_of(shape_of(o));
  if (o.name.starts_with("fcn")) {
    fcn_ = register_module("classifier", FcnHead(deep, o.classes, dropout, saving("classifier")));
  } else {
    deeplab_ = register_module("classifier", DeepLabHead(deep, kDeepLabWidth * o.width, o.classes, dropout, saving("classifier")));
  }
  if (o.aux)
    aux_ = register_module("aux_classifier",
                           FcnHead(backbone_->channels_of(3), o.classes, o.dropout.value_or(kFcnDropout), saving("aux_classifier")));
}

at::Tensor SegmentationImpl::forward(const at::Tensor& images) {
  check_images(images);
  const bool both = aux_ && is_training();
  const std::array wanted = {3, 4};
  std::vector<at::Tensor> maps = backbone_->stages(images, both ? std::span<const int>(wanted) : std::span<const int>(wanted).subspan(1));
  const at::Tensor out = fcn_ ? fcn_->forward(maps.back()) : deeplab_->forward(maps.back());
  maps.pop_back();
  if (!is_training()) return resized_to(out, images, saving("upsample"));
  return both ? at::cat({out, aux_->forward(maps.front())}, 1) : out;
}

}  // namespace satchel
