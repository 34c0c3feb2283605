#include "satchel/models/vgg.h"

#include <algorithm>
#include <utility>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/pool.h"
#include "satchel/nn/activation.h"
#include "satchel/nn/dropout.h"
#include "satchel/nn/pool.h"

namespace satchel {
namespace {

std::string numbered(const char* of, size_t number) { return of + std::string(".") + std::to_string(number); }

}  // namespace

VggImpl::VggImpl(const ImageModelOptions& options) : ImageModelImpl(options) {
  register_module("features", features_);
  register_module("classifier", classifier_);
  add_features();
  add_classifier();
}

void VggImpl::add_features() {
  const ImageModelOptions& o = options();
  const auto next = [&] { return saving(numbered("features", features_->size())); };
  const auto stages = stages_of(o.name);
  int64_t in = o.channels;
  for (size_t s = 0; s < stages.size(); ++s) {
    const int64_t out = o.width << std::min<size_t>(s, 3);
    for (int64_t i = 0; i < stages[s]; ++i) {
      Step step;
      step.conv = nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1), next());
      features_->push_back(step.conv);
      step.at = features_->size();
      if (o.name == "vgg16_bn") {
        step.norm = nn::BatchNorm2d(torch::nn::BatchNormOptions(out), next());
        features_->push_back(step.norm);
      }
      features_->push_back(nn::ReLU(torch::nn::ReLUOptions(), next()));
      step.pooled = i + 1 == stages[s];
      steps_.push_back(std::move(step));
      in = out;
    }
    features_->push_back(nn::MaxPool2d(torch::nn::MaxPool2dOptions(2), next()));
  }
}

void VggImpl::add_classifier() {
  const ImageModelOptions& o = options();
  const auto next = [&] { return saving(numbered("classifier", classifier_->size())); };
  const int64_t maps = o.width << 3, hidden = o.small_stem ? maps : kVggHidden;
  const int64_t read = o.small_stem ? maps : maps * kVggPooled * kVggPooled;
  for (const auto& [in, out] : {std::pair{read, hidden}, {hidden, hidden}, {hidden, o.classes}}) {
    linears_.emplace_back(torch::nn::LinearOptions(in, out), next());
    classifier_->push_back(linears_.back());
    if (linears_.size() == 3) break;
    classifier_->push_back(nn::ReLU(torch::nn::ReLUOptions(), next()));
    classifier_->push_back(nn::Dropout(torch::nn::DropoutOptions(dropout_of(shape_of(o))), next()));
  }
}

/// Norm and ReLU as one function, where their modules would take two passes.
at::Tensor VggImpl::run(Step& step, const at::Tensor& x) {
  at::Tensor h = step.conv->forward(x);
  h = step.norm ? step.norm->forward_act(std::move(h), Activation::relu) : relu(h, saving(numbered("features", step.at)));
  if (!step.pooled) return h;
  PoolOptions pool;
  pool.kernel = {2};
  return max_pool(h, pool, saving(numbered("features", step.at + (step.norm ? 2 : 1))));
}

at::Tensor VggImpl::forward(const at::Tensor& images) {
  check_images(images);
  at::Tensor x = images;
  for (Step& step : steps_) x = run(step, x);
  x = average(x, options().small_stem ? 1 : kVggPooled);
  satchel::NormActOptions chain;
  chain.norm = Norm::none;
  chain.dropout = dropout_of(shape_of(options()));
  chain.statistics.training = is_training();
  for (size_t i = 0; i + 1 < linears_.size(); ++i) {
    x = norm_act(linears_[i]->forward(x), {}, chain, saving(numbered("classifier", 3 * i + 1)));
  }
  return linears_.back()->forward(x);
}

}  // namespace satchel
