#include "satchel/models/preresnet.h"

#include <torch/nn/modules/container/sequential.h>

#include <string>
#include <utility>

namespace satchel {
namespace {

torch::nn::Conv2dOptions padded(int64_t in, int64_t out, int64_t window, int64_t stride) {
  return torch::nn::Conv2dOptions(in, out, window).stride(stride).padding(window / 2).bias(false);
}

}  // namespace

PreResNetBlockImpl::PreResNetBlockImpl(const Sizes& s, const SavePolicy& saving) : saving_(saving) {
  if (s.bottleneck) {
    add_step({s.in, s.planes, 1, 1});
    add_step({s.planes, s.planes, 3, s.stride});
    add_step({s.planes, s.out, 1, 1});
  } else {
    add_step({s.in, s.planes, 3, s.stride});
    add_step({s.planes, s.out, 3, 1});
  }
  if (s.stride == 1 && s.in == s.out) return;
  const auto downsample = register_module("downsample", torch::nn::Sequential());
  downsample_ = nn::Conv2d(padded(s.in, s.out, 1, s.stride), named("downsample.0"));
  downsample->push_back(downsample_);
}

void PreResNetBlockImpl::add_step(const ConvSizes& s) {
  const std::string number = std::to_string(convs_.size() + 1), norm = "bn" + number, conv = "conv" + number;
  norms_.push_back(register_module(norm, nn::BatchNorm2d(torch::nn::BatchNormOptions(s.in), named(norm))));
  convs_.push_back(register_module(conv, nn::Conv2d(padded(s.in, s.out, s.window, s.stride), named(conv))));
}

SavePolicy PreResNetBlockImpl::named(const std::string& name) const {
  return {saving_.method, saving_.name + "." + name, saving_.allocator};
}

at::Tensor PreResNetBlockImpl::forward(const at::Tensor& x) {
  at::Tensor h = norms_[0]->forward_act(x, Activation::relu);
  const at::Tensor skip = downsample_ ? downsample_->forward(h) : x;
  h = convs_[0]->forward(h);
  for (size_t i = 1; i < convs_.size(); ++i) {
    h = norms_[i]->forward_act(std::move(h), Activation::relu);
    h = convs_[i]->forward(h);
  }
  return h.add_(skip);  // fresh, and kept by nobody
}

PreResNetImpl::PreResNetImpl(const ImageModelOptions& o) : ImageModelImpl(o) {
  conv1_ = register_module("conv1", nn::Conv2d(padded(o.channels, o.width, 3, 1), saving("conv1")));
  const bool bottleneck = has_bottleneck(o.name);
  const auto depths = stages_of(o.name);
  int64_t in = o.width;
  for (size_t s = 0; s < depths.size(); ++s) {
    const std::string name = "layer" + std::to_string(s + 1);
    const auto stage = register_module(name, torch::nn::Sequential());
    const int64_t planes = o.width << s, out = bottleneck ? planes * kExpansion : planes;
    for (int64_t b = 0; b < depths[s]; ++b, in = out) {
      const PreResNetBlockImpl::Sizes sizes = {in, planes, out, b == 0 && s > 0 ? 2 : 1, bottleneck};
      blocks_.emplace_back(sizes, saving(name + "." + std::to_string(b)));
      stage->push_back(blocks_.back());
    }
  }
  bn_ = register_module("bn", nn::BatchNorm2d(torch::nn::BatchNormOptions(in), saving("bn")));
  fc_ = register_module("fc", nn::Linear(torch::nn::LinearOptions(in, o.classes), saving("fc")));
}

at::Tensor PreResNetImpl::forward(const at::Tensor& images) {
  check_images(images);
  at::Tensor x = conv1_->forward(images);
  for (PreResNetBlock& block : blocks_) x = block->forward(x);
  x = bn_->forward_act(std::move(x), Activation::relu);
  return fc_->forward(drop(average(x, 1)));
}

}  // namespace satchel
