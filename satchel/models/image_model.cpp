#include "satchel/models/image_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/flatten.h>
#include <torch/nn/init.h>

#include <memory>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/pool.h"
#include "satchel/core/error.h"
#include "satchel/models/densenet.h"
#include "satchel/models/resnet.h"
#include "satchel/models/segmentation.h"
#include "satchel/models/vgg.h"

namespace satchel {
namespace {

constexpr const char* kOp = "image_model";

enum class Family : uint8_t { resnet, vgg, densenet, segmentation };

Family family_of(const std::string& name) {
  if (is_segmentation_model(name)) return Family::segmentation;
  return is_resnet(name) ? Family::resnet : name.starts_with("vgg") ? Family::vgg : Family::densenet;
}

std::shared_ptr<ImageModelImpl> made(const ImageModelOptions& options) {
  switch (family_of(options.name)) {
    case Family::resnet: return std::make_shared<ResNetImpl>(options);
    case Family::vgg: return std::make_shared<VggImpl>(options);
    case Family::densenet: return std::make_shared<DenseNetImpl>(options);
    case Family::segmentation: return std::make_shared<SegmentationImpl>(options);
  }
  fail(kOp, "a model must have a family", options.name);
}

/// As torchvision: He's normal numbers for convolutions, by what they give (DenseNet: by what they read); VGG's linear layers small
/// normal numbers. Norms, heads of segmentation and all else stand as their modules made them.
void initialise(torch::nn::Module& model, Family family) {
  const at::NoGradGuard no_grad;
  const bool segments = family == Family::segmentation;
  for (const auto& module : segments ? model.named_children()["backbone"]->modules(false) : model.modules(false)) {
    if (auto* conv = module->as<nn::Conv2d>()) {
      const auto mode = family == Family::densenet ? torch::nn::init::FanModeType(torch::kFanIn) : torch::kFanOut;
      torch::nn::init::kaiming_normal_(conv->weight, 0, mode, torch::kReLU);
      if (conv->bias.defined()) torch::nn::init::zeros_(conv->bias);
    } else if (auto* linear = module->as<nn::Linear>()) {
      if (family == Family::vgg) torch::nn::init::normal_(linear->weight, 0, 0.01);
      if (family != Family::resnet) torch::nn::init::zeros_(linear->bias);
    }
  }
}

/// The same numbers in the order that convolutions of channels_last maps read them.
void order_channels_last(torch::nn::Module& model) {
  for (at::Tensor& p : model.parameters()) {
    if (p.dim() == 4) p.set_data(p.contiguous(at::MemoryFormat::ChannelsLast));
  }
}

}  // namespace

ImageShape shape_of(const ImageModelOptions& o) { return {o.name, o.classes, o.channels, o.small_stem, o.width, o.dropout, o.aux}; }

SavePolicy ImageModelImpl::saving(const std::string& name) const { return {options_.saving.method, name, options_.saving.allocator}; }

void ImageModelImpl::check_images(const at::Tensor& x) const {
  if (!x.defined()) fail(kOp, "images must be a tensor", "none");
  if (x.dim() != 4) fail(kOp, "images must have four dimensions, batch × channels × height × width", x.sizes());
  if (x.size(1) != options_.channels) fail(kOp, "images must have " + std::to_string(options_.channels) + " channels", x.sizes());
  check_side(shape_of(options_), x.size(2), x.size(3), kOp);
}

at::Tensor ImageModelImpl::pool_stem(const at::Tensor& x, const std::string& name) const {
  if (options_.small_stem) return x;
  return max_pool(x, {.kernel = {3}, .stride = {2}, .padding = {1}}, saving(name));
}

at::Tensor ImageModelImpl::average(const at::Tensor& x, int64_t side) const {
  return at::flatten(adaptive_avg_pool(x, {side, side}, saving("avgpool")), 1);
}

at::Tensor ImageModelImpl::drop(const at::Tensor& x) const {
  const double p = dropout_of(shape_of(options_));
  return p > 0 && is_training() ? dropout(x, p, true, saving("dropout")) : x;
}

ImageModel make_image_model(const ImageModelOptions& options) {
  validate(shape_of(options), kOp);
  validate(options.saving.method, kOp);
  if (budget_of(options.saving.method) > 0)
    fail(kOp, "a budget must become a mean first, with_mean() of the plan", options.saving.method.name);
  check_dropout(dropout_of(shape_of(options)), kOp);
  ImageModel model(made(options));
  initialise(*model, family_of(options.name));
  order_channels_last(*model);
  return model;
}

}  // namespace satchel
