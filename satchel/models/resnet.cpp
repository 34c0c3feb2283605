#include "satchel/models/resnet.h"

#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <utility>

#include "satchel/autograd/shared_gradient.h"

namespace satchel {
namespace {

torch::nn::Conv2dOptions square(int64_t in, int64_t out, int64_t window, int64_t stride = 1) {
  return torch::nn::Conv2dOptions(in, out, window).stride(stride).padding(window / 2).bias(false);
}

}  // namespace

ResNetBlockImpl::ResNetBlockImpl(const Sizes& s, const SavePolicy& saving) : saving_(saving) {
  if (s.bottleneck) {
    convs_ = {add_conv("conv1", square(s.in, s.planes, 1)), add_conv("conv2", square(s.planes, s.planes, 3, s.stride)),
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
  skip_norm_ = nn::BatchNorm2d(torch::nn::BatchNormOptions(s.out), named("downsample.1"));
  downsample->push_back(skip_conv_);
  downsample->push_back(skip_norm_);
}

nn::Conv2d ResNetBlockImpl::add_conv(const std::string& name, const torch::nn::Conv2dOptions& options) {
  return register_module(name, nn::Conv2d(options, named(name)));
}

nn::BatchNorm2d ResNetBlockImpl::add_norm(const std::string& name, int64_t channels) {
  return register_module(name, nn::BatchNorm2d(torch::nn::BatchNormOptions(channels), named(name)));
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

ResNetImpl::ResNetImpl(const ImageModelOptions& o)
    : ImageModelImpl(o),
      conv1_(
          register_module("conv1", nn::Conv2d(square(o.channels, o.width, o.small_stem ? 3 : 7, o.small_stem ? 1 : 2), saving("conv1")))),
      bn1_(register_module("bn1", nn::BatchNorm2d(torch::nn::BatchNormOptions(o.width), saving("bn1")))) {
  add_stages();
}

void ResNetImpl::add_stages() {
  const ImageModelOptions& o = options();
  const bool bottleneck = has_bottleneck(o.name);
  const auto stages = stages_of(o.name);
  int64_t in = o.width;
  for (size_t s = 0; s < stages.size(); ++s) {
    const std::string name = "layer" + std::to_string(s + 1);
    const auto stage = register_module(name, torch::nn::Sequential());
    const int64_t planes = o.width << s, out = bottleneck ? planes * kExpansion : planes;
    for (int64_t b = 0; b < stages[s]; ++b) {
      const ResNetBlockImpl::Sizes sizes = {in, planes, out, b == 0 && s > 0 ? 2 : 1, bottleneck};
      blocks_.emplace_back(sizes, saving(name + "." + std::to_string(b)));
      stage->push_back(blocks_.back());
      in = out;
    }
  }
  fc_ = register_module("fc", nn::Linear(torch::nn::LinearOptions(in, o.classes), saving("fc")));
}

at::Tensor ResNetImpl::forward(const at::Tensor& images) {
  check_images(images);
  at::Tensor x = bn1_->forward_act(conv1_->forward(images), Activation::relu);
  x = pool_stem(x, "maxpool");
  for (ResNetBlock& block : blocks_) x = block->forward(std::move(x));
  return fc_->forward(drop(average(x, 1)));
}

}  // namespace satchel
