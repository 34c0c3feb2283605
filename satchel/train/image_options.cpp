#include "satchel/train/image_options.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "satchel/core/error.h"
#include "satchel/plan/image_plan.h"
#include "satchel/train/options.h"

namespace satchel {
namespace {

constexpr int64_t kMostImage = 1 << 14, kMostWidth = 1 << 12, kMostLoaders = 256;

void between(const char* what, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    fail("train", std::string(what) + " must be " + std::to_string(least) + " to " + std::to_string(most), value);
}

void at_least(const char* what, int64_t value, int64_t least) {
  if (value < least) fail("train", std::string(what) + " must be at least " + std::to_string(least), value);
}

void finite(const char* what, double value, double least, bool above) {
  if (std::isfinite(value) && (above ? value > least : value >= least)) return;
  fail("train", std::string(what) + " must be finite and " + (above ? "above " : "at least ") + std::to_string(least).substr(0, 1), value);
}

void check_loss_scale(const LossScale& s) {
  finite("the first loss scale", s.initial, 0, true);
  finite("growth of the loss scale", s.growth, 1, true);
  if (!(s.backoff > 0 && s.backoff < 1)) fail("train", "backoff of the loss scale must be above 0 and below 1", s.backoff);
  at_least("steps before the loss scale grows", s.interval, 1);
}

void check_rates(const ImageTrainOptions& o) {
  finite("lr", o.lr, 0, true);
  finite("weight decay", o.weight_decay, 0, false);
  finite("gamma", o.gamma, 0, true);
  finite("warm-up", o.warmup, 0, false);
  if (!(o.momentum >= 0 && o.momentum < 1)) fail("train", "momentum must be at least 0 and below 1", o.momentum);
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
  between("width", o.width, 1, kMostWidth);
  validate(o.method, "train");
  at_least("epochs", o.epochs, 1);
  between("batch", o.batch, 1, kMostBatch);
  between("image", o.image, 0, kMostImage);
  between("loaders", o.loaders, 1, kMostLoaders);
  check_rates(o);
  if (!(o.label_smoothing >= 0 && o.label_smoothing < 1))
    fail("train", "label smoothing must be at least 0 and below 1", o.label_smoothing);
  check_loss_scale(o.loss_scale);
  at_least("epochs between evaluations", o.eval_every, 1);
  at_least("epochs between checkpoints", o.checkpoint_every, 0);
  if (o.tf32 && !names_cuda(o.device)) fail("train", "tf32 needs device cuda", o.device);
  if (o.checkpoint.empty() && (o.resume || o.checkpoint_every > 0)) fail("train", "resume and checkpoint_every need a checkpoint", "none");
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
  shape.small_stem = o.small_stem.value_or(wants_small_stem(height, width));
  shape.width = o.width;
  shape.dropout = o.dropout;
  return shape;
}

std::vector<SavedTensor> planned_saves(const ImageTrainOptions& o, const ImageShape& shape, int64_t height, int64_t width) {
  return plan_image(shape, {o.batch, height, width, o.amp != Autocast::none}, o.method);
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
