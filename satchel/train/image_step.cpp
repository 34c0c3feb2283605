#include "satchel/train/image_step.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

#include "satchel/autograd/report.h"
#include "satchel/autograd/saving.h"
#include "satchel/core/error.h"
#include "satchel/core/noise.h"
#include "satchel/train/image_options.h"

namespace satchel {
namespace {

constexpr uint32_t kWeights = 1;  // rank of the seed of initial weights, as train_graph's; steps have rank 0

bool has_momentum(const ImageTrainOptions& o) { return o.momentum > 0 || o.schedule == Decay::onecycle; }

}  // namespace

AutocastGuard::AutocastGuard(at::DeviceType device, Autocast type) : device_(device), on_(is_half(type)) {
  if (!on_) return;
  before_ = at::autocast::is_autocast_enabled(device);
  type_before_ = at::autocast::get_autocast_dtype(device);
  cache_before_ = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_enabled(device, true);
  at::autocast::set_autocast_dtype(device, type == Autocast::bf16 ? at::kBFloat16 : at::kHalf);
  at::autocast::set_autocast_cache_enabled(true);
  at::autocast::increment_nesting();
}

AutocastGuard::~AutocastGuard() {
  if (!on_) return;
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_cache_enabled(cache_before_);
  at::autocast::set_autocast_dtype(device_, type_before_);
  at::autocast::set_autocast_enabled(device_, before_);
}

ImageModel make_model(const ImageTrainOptions& options, const ImageShape& shape, at::Device device,
                      const std::shared_ptr<BitShares>& shares) {
  const SeededTorch weights(derive_seed(options.seed, 0, kWeights, 0));  // on the CPU: equal on every device and for every method
  ImageModelOptions o{shape.name, shape.classes, shape.channels, shape.small_stem, shape.width, shape.dropout, {}};
  o.saving.method = options.method;
  o.saving.shares = shares;
  ImageModel model = make_image_model(o);
  model->to(device);
  const at::NoGradGuard guard;
  const at::MemoryFormat order = options.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  for (at::Tensor& p : model->parameters()) {
    if (p.dim() == 4) p.set_data(p.contiguous(order));
  }
  model->train();
  return model;
}

ImageStep::ImageStep(ImageModel model, const ImageTrainOptions& options, at::Device device)
    : model_(std::move(model)), options_(options), device_(device), parameters_(model_->parameters()) {
  const at::NoGradGuard guard;
  if (has_momentum(options_)) {
    for (const at::Tensor& p : parameters_) momentum_.push_back(at::zeros_like(p));
  }
  if (options_.amp == Autocast::fp16) scaler_.emplace(options_.loss_scale, device_);
}

at::Tensor ImageStep::operator()(const at::Tensor& images, const at::Tensor& labels, const Rates& rates, uint64_t seed, StepCost* cost) {
  const SeedRun run(seed);
  seed_torch_on(device_, seed);
  const int64_t stood = clear_gradients(parameters_);  // those of the step before: new ones take their place
  std::optional<MemoryMeter> meter;
  if (cost != nullptr) meter.emplace(device_);
  std::optional<SeedBank> bank;
  if (device_.is_cuda()) bank.emplace(draw_seeds(seeds_, device_));
  at::Tensor loss = forward_to_optimizer(images, labels, rates, meter ? &*meter : nullptr, cost);
  if (bank) seeds_ = bank->asked();
  if (meter) cost->peak_bytes = meter->peak() - stood;
  return loss;
}

at::Tensor ImageStep::forward_to_optimizer(const at::Tensor& images, const at::Tensor& labels, const Rates& rates, MemoryMeter* meter,
                                           StepCost* cost) {
  at::Tensor logits;
  {
    const AutocastGuard autocast(device_.type(), options_.amp);
    logits = model_->forward(images);
  }
  const int64_t logit_bytes = static_cast<int64_t>(logits.nbytes());
  const int64_t after_forward = meter != nullptr ? meter->allocated() : 0;
  const at::Tensor loss =
      at::cross_entropy_loss(logits.to(at::kFloat), labels, {}, at::Reduction::Mean, -100, options_.label_smoothing);  // −100: torch's own
  logits.reset();
  if (meter != nullptr) {
    cost->saved_bytes = after_forward - logit_bytes;
    cost->loss_bytes = meter->allocated() - cost->saved_bytes;
    cost->tensors = packed_tensors(loss);
  }
  (scaler_ ? scaler_->scaled(loss) : loss).backward();
  move(rates);
  return loss.detach();
}

void ImageStep::move(const Rates& rates) {
  const at::NoGradGuard guard;
  std::vector<at::Tensor> moved, gradients, momentum;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].grad().defined()) continue;
    moved.push_back(parameters_[i]);
    gradients.push_back(parameters_[i].grad());
    if (!momentum_.empty()) momentum.push_back(momentum_[i]);
  }
  if (moved.empty()) return;
  std::optional<at::Tensor> found;
  if (scaler_) {
    scaler_->unscale_(gradients);
    found = scaler_->found();
  }
  // Momentum starts as zeros: its first value is the gradient, as torch's.
  at::_fused_sgd_(moved, gradients, momentum, options_.weight_decay, momentum_.empty() ? 0 : rates.momentum, rates.lr, 0,
                  options_.nesterov && !momentum_.empty(), false, false, {}, found);
  if (scaler_) scaler_->update();
}

at::Tensor ImageStep::evaluate(const at::Tensor& images) {
  const at::NoGradGuard guard;
  const AutocastGuard autocast(device_.type(), options_.amp);
  model_->eval();
  const at::Tensor logits = model_->forward(images).to(at::kFloat);
  model_->train();
  return logits;
}

int64_t ImageStep::parameter_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& p : parameters_) bytes += static_cast<int64_t>(p.nbytes());
  return bytes;
}

std::map<std::string, at::Tensor> ImageStep::state() const {
  std::map<std::string, at::Tensor> all = scaler_ ? scaler_->state() : std::map<std::string, at::Tensor>();
  for (size_t i = 0; i < momentum_.size(); ++i) all[std::to_string(i) + ".momentum"] = momentum_[i];
  return all;
}

void ImageStep::restore(const std::map<std::string, at::Tensor>& state) {
  const at::NoGradGuard guard;
  check_state(this->state(), state);
  for (size_t i = 0; i < momentum_.size(); ++i) momentum_[i].copy_(state.at(std::to_string(i) + ".momentum"));
  if (scaler_) scaler_->restore(state);
}

}  // namespace satchel
