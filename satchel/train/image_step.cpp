#include "satchel/train/image_step.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>

#include <utility>
#include <vector>

#include "satchel/autograd/save_policy.h"
#include "satchel/core/noise.h"
#include "satchel/train/image_options.h"

namespace satchel {
namespace {

constexpr uint32_t kWeights = 1;  // rank of the seed of initial weights, as train_graph's; steps have rank 0

/// Parameters that are not frozen.
std::vector<at::Tensor> learning(const torch::nn::Module& model) {
  std::vector<at::Tensor> all = model.parameters();
  std::erase_if(all, [](const at::Tensor& p) { return !p.requires_grad(); });
  return all;
}

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
                      const std::shared_ptr<BitAllocator>& allocator) {
  const SeededTorch weights(derive_seed(options.seed, 0, kWeights, 0));  // on the CPU: equal on every device and for every method
  ImageModel model = make_image_model({.name = shape.name,
                                       .classes = shape.classes,
                                       .channels = shape.channels,
                                       .small_stem = shape.small_stem,
                                       .width = shape.width,
                                       .dropout = shape.dropout,
                                       .saving = {.method = options.method, .allocator = allocator},
                                       .stochastic_depth = shape.stochastic_depth,
                                       .freeze = shape.freeze,
                                       .aux = shape.aux});
  model->to(device);
  const at::NoGradGuard guard;
  const at::MemoryFormat order = options.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  for (at::Tensor& p : model->parameters()) {
    if (p.dim() == 4) p.set_data(p.contiguous(order));
  }
  model->train();
  return model;
}

ImageStep::ImageStep(ImageModel model, const ImageTrainOptions& options, at::Device device, const PixelLossOptions& pixels)
    : model_(std::move(model)),
      device_(device),
      amp_(options.amp),
      pixels_(pixels),
      optimizer_(options, learning(*model_)),
      step_({[this] {
               const AutocastGuard autocast(device_.type(), amp_);
               return model_->forward(images_);
             },
             [this, smoothing = options.label_smoothing](const at::Tensor& logits) { return loss_of(logits, smoothing); }},
            optimizer_, device_) {
  pixels_.classes = model_->options().classes;
  pixels_.torch_own = is_baseline(options.method);
}

at::Tensor ImageStep::loss_of(const at::Tensor& logits, double smoothing) const {
  if (is_segmentation_model(model_->options().name)) return pixel_loss(logits, labels_, pixels_);
  return at::cross_entropy_loss(logits.to(at::kFloat), labels_, {}, at::Reduction::Mean, -100, smoothing);  // −100: torch's own
}

at::Tensor ImageStep::operator()(const at::Tensor& images, const at::Tensor& labels, const Rates& rates, uint64_t seed, StepCost* cost) {
  images_ = images;
  labels_ = labels;
  optimizer_.set_rates(rates);
  at::Tensor loss = step_(seed, cost);
  images_.reset();
  labels_.reset();
  return loss;
}

int64_t ImageStep::parameter_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& p : model_->parameters()) bytes += static_cast<int64_t>(p.nbytes());
  return bytes;
}

at::Tensor ImageStep::evaluate(const at::Tensor& images) {
  const at::NoGradGuard guard;
  const AutocastGuard autocast(device_.type(), amp_);
  model_->eval();
  const at::Tensor logits = model_->forward(images).to(at::kFloat);
  model_->train();
  return logits;
}

}  // namespace satchel
