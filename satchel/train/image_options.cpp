#include "satchel/train/image_options.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "satchel/core/error.h"
#include "satchel/plan/image_plan.h"
#include "satchel/train/options.h"
#include "satchel/train/ranges.h"

namespace satchel {
namespace {

constexpr int64_t kMostImage = 1 << 14, kMostChannels = 1 << 12, kMostLoaders = 256;

void check_loss_scale(const LossScale& s) {
  check_finite_above("the first loss scale", s.initial, 0);
  check_finite_above("growth of the loss scale", s.growth, 1);
  if (!(s.backoff > 0 && s.backoff < 1)) fail("train", "backoff of the loss scale must be above 0 and below 1", s.backoff);
  check_at_least("steps before the loss scale grows", s.interval, 1);
}

void check_rates(const ImageTrainOptions& o) {
  check_finite_above("gamma", o.gamma, 0);
  check_finite_at_least("warm-up", o.warmup, 0);
  if (o.nesterov && o.momentum == 0) fail("train", "nesterov needs momentum", o.momentum);
  if (o.warmup > static_cast<double>(o.epochs)) fail("train", "warm-up must be at most " + std::to_string(o.epochs) + " epochs", o.warmup);
  if (o.schedule == Decay::onecycle && o.warmup > 0) fail("train", "onecycle has a rise of its own: warm-up must be 0", o.warmup);
  double last = 0;
  for (const double m : o.milestones) {
    if (!std::isfinite(m) || m <= last) fail("train", "milestones must be above 0 and rise", m);
    last = m;
  }
  if (!o.milestones.empty() && o.schedule != Decay::step) fail("train", "milestones need schedule step", name_of(o.schedule));
}

}  // namespace

void validate(const ImageTrainOptions& o) {
  validate(shape_of(o, 2, 3, 32, 32), "train");
  check_between("width", o.width, 1, kMostChannels);
  validate(o.method, "train");
  validate_run(o);
  check_between("batch", o.batch, 1, kMostBatch);
  check_between("image", o.image, 0, kMostImage);
  check_between("loaders", o.loaders, 1, kMostLoaders);
  check_rates(o);
  if (!(o.label_smoothing >= 0 && o.label_smoothing < 1))
    fail("train", "label smoothing must be at least 0 and below 1", o.label_smoothing);
  check_loss_scale(o.loss_scale);
}

Schedule schedule_of(const ImageTrainOptions& o, int64_t steps_per_epoch) {
  const auto steps = [&](double epochs) { return static_cast<int64_t>(std::llround(epochs * static_cast<double>(steps_per_epoch))); };
  Schedule s{o.schedule, o.lr, o.momentum, o.epochs * steps_per_epoch, steps(o.warmup), {}, o.gamma};
  const auto third = static_cast<double>(o.epochs) / 3;
  for (const double m : o.milestones.empty() ? std::vector{third, 2 * third} : o.milestones) {
    const int64_t at = std::max<int64_t>(1, steps(m));
    if (s.milestones.empty() || at > s.milestones.back()) s.milestones.push_back(at);  // epochs of few steps may fall together
  }
  return s;
}

ImageShape shape_of(const ImageTrainOptions& o, int64_t classes, int64_t channels, int64_t height, int64_t width) {
  ImageShape shape;
  shape.name = o.model;
  shape.classes = classes;
  shape.channels = channels;
  const bool segments = is_segmentation_model(o.model);
  shape.small_stem = o.small_stem.value_or(!segments && wants_small_stem(height, width));
  shape.aux = segments && o.aux;
  shape.width = o.width;
  shape.dropout = o.dropout;
  return shape;
}

std::vector<SavedTensor> planned_saves(const ImageTrainOptions& o, const ImageShape& shape, int64_t height, int64_t width) {
  return plan_image(shape, {o.batch, height, width, is_half(o.amp)}, o.method);
}

ConvolutionSettings::ConvolutionSettings(at::Device device, const ConvolutionOptions& options) : cuda_(device.is_cuda()) {
  if (!cuda_) return;
  if (options.growing_segments) segments_.emplace(device);
  at::Context& torch = at::globalContext();
  products_ = torch.allowTF32CuBLAS();
  convolutions_ = torch.allowTF32CuDNN();
  tries_ = torch.benchmarkCuDNN();
  torch.setAllowTF32CuBLAS(options.tf32);
  torch.setAllowTF32CuDNN(options.tf32);
  torch.setBenchmarkCuDNN(options.tries);
}

ConvolutionSettings::~ConvolutionSettings() {
  if (!cuda_) return;
  at::Context& torch = at::globalContext();
  torch.setAllowTF32CuBLAS(products_);
  torch.setAllowTF32CuDNN(convolutions_);
  torch.setBenchmarkCuDNN(tries_);
}

}  // namespace satchel
