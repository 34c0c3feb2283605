#include "satchel/models/resnet.h"

#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <utility>

#include "satchel/autograd/pool.h"
#include "satchel/autograd/shared_gradient.h"
#include "satchel/core/error.h"

namespace satchel {
namespace {

torch::nn::Conv2dOptions square(int64_t in, int64_t out, int64_t window, int64_t stride = 1, int64_t dilation = 1) {
  return torch::nn::Conv2dOptions(in, out, window).stride(stride).padding(window / 2 * dilation).dilation(dilation).bias(false);
}

}  // namespace

ResNetBlockImpl::ResNetBlockImpl(const Sizes& s, const SavePolicy& saving) : saving_(saving), frozen_norm_(s.frozen_norm) {
  if (s.bottleneck) {
    convs_ = {add_conv("conv1", square(s.in, s.planes, 1)), add_conv("conv2", square(s.planes, s.planes, 3, s.stride, s.dilation)),
              add_conv("conv3", square(s.planes, s.out, 1))};
    norms_ = {add_norm("bn1", s.planes), add_norm("bn2", s.planes), add_norm("bn3", s.out)};
  } else {
    convs_ = {add_conv("conv1", square(s.in, s.planes, 3, s.stride)), add_conv("conv2", square(s.planes, s.out, 3))};
    norms_ = {add_norm("bn1", s.planes), add_norm("bn2", s.out)};
  }
  if (s.stride != 1 || s.in != s.out) add_downsample(s);
}

void ResNetBlockImpl::add_downsample(const Sizes& s) {
  const auto downsample = register_module("downsample", torch::nn::Sequential());
  skip_conv_ = nn::Conv2d(square(s.in, s.out, 1, s.stride), named("downsample.0"));
  skip_norm_ = nn::BatchNorm2d(torch::nn::BatchNormOptions(s.out), named("downsample.1"), frozen_norm_);
  downsample->push_back(skip_conv_);
  downsample->push_back(skip_norm_);
}

nn::Conv2d ResNetBlockImpl::add_conv(const std::string& name, const torch::nn::Conv2dOptions& options) {
  return register_module(name, nn::Conv2d(options, named(name)));
}

nn::BatchNorm2d ResNetBlockImpl::add_norm(const std::string& name, int64_t channels) {
  return register_module(name, nn::BatchNorm2d(torch::nn::BatchNormOptions(channels), named(name), frozen_norm_));
}

SavePolicy ResNetBlockImpl::named(const std::string& name) const { return {saving_.method, saving_.name + "." + name, saving_.allocator}; }

at::Tensor ResNetBlockImpl::forward(at::Tensor x) {
  const auto x_gradient = std::make_shared<SharedGradient>();
  at::Tensor h = convs_[0]->forward_in_block(x, x_gradient);
  for (size_t i = 1; i < convs_.size(); ++i) {
    h = norms_[i - 1]->forward_act(std::move(h), Activation::relu);
    if (i + 1 < convs_.size()) h = convs_[i]->forward(h);
  }
  // Between the last convolution and the rest, forward and backward: the long branch's maps are small here, and the block's input is not
  // read again.
  if (skip_conv_) x = skip_norm_->forward_to_sum(skip_conv_->forward_in_block(x, x_gradient));
  const nn::Conv2d& last = convs_.back();
  const int64_t border = (*last->options.kernel_size())[0] / 2;
  return norms_.back()->forward_sum({std::move(h), last->weight, {{1}, {border}, {1}, {0}, false, 1}, last->saving}, std::move(x),
                                    skip_conv_ ? nullptr : x_gradient);
}

ResNetBodyImpl::ResNetBodyImpl(const ResNetBodyOptions& o)
    : options_(o),
      conv1_(register_module("conv1", nn::Conv2d(square(o.channels, o.width, o.small_stem ? 3 : 7, o.small_stem ? 1 : 2), named("conv1")))),
      bn1_(register_module("bn1", nn::BatchNorm2d(torch::nn::BatchNormOptions(o.width), named("bn1"), o.frozen_norm))) {
  add_stages();
  freeze_stages();
}

void ResNetBodyImpl::freeze_stages() {
  const auto count = static_cast<int>(stages_.size());
  if (options_.trainable < 0 || options_.trainable > count + 1)
    fail("resnet", "stages to train must be 0 to " + std::to_string(count + 1), options_.trainable);
  const auto freeze = [](torch::nn::Module& module) {
    for (at::Tensor& p : module.parameters()) p.requires_grad_(false);
  };
  for (int s = 0; s < count - options_.trainable; ++s) {
    for (ResNetBlock& block : stages_[static_cast<size_t>(s)]) freeze(*block);
  }
  if (options_.trainable > count) return;
  freeze(*conv1_);
  freeze(*bn1_);
}

SavePolicy ResNetBodyImpl::named(const std::string& name) const {
  return {options_.saving.method, options_.saving.name + name, options_.saving.allocator};
}

void ResNetBodyImpl::add_stages() {
  const ResNetBodyOptions& o = options_;
  const bool bottleneck = has_bottleneck(o.name);
  if (!bottleneck && (o.dilate[0] || o.dilate[1] || o.dilate[2])) fail("resnet", "only a ResNet with bottlenecks may be dilated", o.name);
  const auto depths = stages_of(o.name);
  int64_t in = o.width, dilation = 1;
  for (size_t s = 0; s < depths.size(); ++s) {
    const std::string name = "layer" + std::to_string(s + 1);
    const auto stage = register_module(name, torch::nn::Sequential());
    const int64_t planes = (o.width << s) * widening_of(o.name), out = (o.width << s) * (bottleneck ? kExpansion : 1);
    const int64_t before = dilation;  // the first block still reads places that stand close
    const bool dilated = s > 0 && o.dilate[s - 1];
    if (dilated) dilation *= 2;
    stages_.emplace_back();
    for (int64_t b = 0; b < depths[s]; ++b) {
      const int64_t stride = b == 0 && s > 0 && !dilated ? 2 : 1;
      const ResNetBlockImpl::Sizes sizes = {in, planes, out, stride, b == 0 ? before : dilation, bottleneck, o.frozen_norm};
      stages_.back().emplace_back(sizes, named(name + "." + std::to_string(b)));
      stage->push_back(stages_.back().back());
      in = out;
    }
    channels_.push_back(out);
  }
}

std::vector<at::Tensor> ResNetBodyImpl::stages(const at::Tensor& images, std::span<const int> wanted) {
  at::Tensor x = bn1_->forward_act(conv1_->forward(images), Activation::relu);
  if (!options_.small_stem) x = max_pool(x, {.kernel = {3}, .stride = {2}, .padding = {1}}, named("maxpool"));
  std::vector<at::Tensor> maps;
  for (size_t s = 0, next = 0; s < stages_.size() && next < wanted.size(); ++s) {
    for (ResNetBlock& block : stages_[s]) x = block->forward(std::move(x));
    if (wanted[next] != static_cast<int>(s) + 1) continue;
    maps.push_back(x);
    ++next;
  }
  return maps;
}

at::Tensor ResNetBodyImpl::forward(const at::Tensor& images) {
  const std::array last = {static_cast<int>(stages_.size())};
  return std::move(stages(images, last).front());
}

ResNetImpl::ResNetImpl(const ImageModelOptions& o)
    : ImageModelImpl(o), body_(ResNetBodyOptions{o.name, o.channels, o.width, o.small_stem, {}, saving(""), false, 5}) {
  for (const auto& layer : body_->named_children()) register_module(layer.key(), layer.value());
  fc_ = register_module("fc", nn::Linear(torch::nn::LinearOptions(body_->channels_of(4), o.classes), saving("fc")));
}

at::Tensor ResNetImpl::forward(const at::Tensor& images) {
  check_images(images);
  return fc_->forward(drop(average(body_->forward(images), 1)));
}

}  // namespace satchel
