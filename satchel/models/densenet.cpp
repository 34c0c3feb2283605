#include "satchel/models/densenet.h"

#include <ATen/ops/cat.h>

#include <utility>

#include "satchel/autograd/pool.h"

namespace satchel {
namespace {

/// A module that only holds others by name.
std::shared_ptr<torch::nn::Module> folder() { return std::make_shared<torch::nn::Module>(); }

}  // namespace

DenseNetImpl::DenseNetImpl(const ImageModelOptions& o) : ImageModelImpl(o) {
  features_ = register_module("features", folder());
  const int64_t window = o.small_stem ? 3 : 7, stride = o.small_stem ? 1 : 2;
  const auto stem = torch::nn::Conv2dOptions(o.channels, o.width, window).stride(stride).padding(window / 2).bias(false);
  conv0_ = features_->register_module("conv0", nn::Conv2d(stem, saving("features.conv0")));
  norm0_ = features_->register_module("norm0", nn::BatchNorm2d(torch::nn::BatchNormOptions(o.width), saving("features.norm0")));
  const auto counts = stages_of(o.name);
  int64_t channels = o.width;
  for (size_t s = 0; s < counts.size(); ++s) {
    Stage stage;
    const std::string number = std::to_string(s + 1);
    channels = add_block(stage, number, channels, counts[s]);
    if (s + 1 < counts.size()) channels = add_transition(stage, number, channels);
    stages_.push_back(std::move(stage));
  }
  norm5_ = features_->register_module("norm5", nn::BatchNorm2d(torch::nn::BatchNormOptions(channels), saving("features.norm5")));
  classifier_ = register_module("classifier", nn::Linear(torch::nn::LinearOptions(channels, o.classes), saving("classifier")));
}

DenseNetImpl::Step DenseNetImpl::add_step(torch::nn::Module& to, const std::string& at, const std::string& number, const Sizes& s) {
  const auto conv = torch::nn::Conv2dOptions(s.in, s.out, s.window).padding(s.window / 2).bias(false);
  const std::string norm_name = "norm" + number, conv_name = "conv" + number;
  Step step;
  step.norm = to.register_module(norm_name, nn::BatchNorm2d(torch::nn::BatchNormOptions(s.in), saving(at + norm_name)));
  step.conv = to.register_module(conv_name, nn::Conv2d(conv, saving(at + conv_name)));
  return step;
}

int64_t DenseNetImpl::add_block(Stage& stage, const std::string& number, int64_t channels, int64_t count) {
  const int64_t growth = options().width / 2;
  const std::string name = "denseblock" + number;
  const auto block = features_->register_module(name, folder());
  for (int64_t i = 0; i < count; ++i) {
    const std::string layer_name = "denselayer" + std::to_string(i + 1), at = "features." + name + "." + layer_name + ".";
    const auto layer = block->register_module(layer_name, folder());
    stage.layers.push_back(add_step(*layer, at, "1", {channels, kExpansion * growth, 1}));
    stage.layers.push_back(add_step(*layer, at, "2", {kExpansion * growth, growth, 3}));
    channels += growth;
  }
  return channels;
}

int64_t DenseNetImpl::add_transition(Stage& stage, const std::string& number, int64_t channels) {
  const std::string name = "transition" + number, at = "features." + name + ".";
  const auto transition = features_->register_module(name, folder());
  stage.transition = add_step(*transition, at, "", {channels, channels / 2, 1});
  stage.pool = at + "pool";
  return channels / 2;
}

at::Tensor DenseNetImpl::run(Step& step, at::Tensor x) {
  return step.conv->forward(step.norm->forward_act(std::move(x), Activation::relu));
}

at::Tensor DenseNetImpl::dense(Stage& stage, const at::Tensor& x) {
  std::vector<at::Tensor> made = {x};
  const auto joined = [&] { return made.size() == 1 ? made[0] : at::cat(made, 1); };
  for (size_t i = 0; i < stage.layers.size(); i += 2) made.push_back(run(stage.layers[i + 1], run(stage.layers[i], joined())));
  return joined();
}

at::Tensor DenseNetImpl::forward(const at::Tensor& images) {
  check_images(images);
  at::Tensor x = norm0_->forward_act(conv0_->forward(images), Activation::relu);
  x = pool_stem(x, "features.pool0");
  PoolOptions halves;
  halves.kernel = {2};
  for (Stage& stage : stages_) {
    x = dense(stage, x);
    if (stage.transition.conv) x = avg_pool(run(stage.transition, std::move(x)), halves, saving(stage.pool));
  }
  x = norm5_->forward_act(std::move(x), Activation::relu);
  return classifier_->forward(drop(average(x, 1)));
}

}  // namespace satchel
