#include "satchel/train/image_task.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/noise.h"
#include "satchel/plan/image_plan.h"
#include "satchel/tensor/output.h"
#include "satchel/train/image_checkpoint.h"
#include "satchel/train/image_options.h"
#include "satchel/train/memory.h"
#include "satchel/train/options.h"

namespace satchel {
namespace {

/// A budget becomes the mean that the plan finds for it.
ImageTrainOptions with_own_mean(ImageTrainOptions options, const ImageShape& shape, const BatchFeed& feed) {
  options.method = with_mean(shape, {options.batch, feed.height(), feed.width()}, options.method);
  return options;
}

}  // namespace

ImageTask::ImageTask(const ImageTrainOptions& options, at::Device device, std::unique_ptr<BatchFeed> train, const ImageShape& shape,
                     int64_t samples, const PixelLossOptions& pixels)
    : options_(options),
      device_(device),
      train_(std::move(train)),
      shape_(shape),
      shares_(allocates_bits(options_.method) ? std::make_shared<RunningBitAllocator>(BitAllocatorOptions{samples}) : nullptr),
      step_(make_model(with_own_mean(options_, shape_, *train_), shape_, device_, shares_), options_, device_, pixels),
      model_(step_.model()),
      schedule_(schedule_of(options_, train_->batches())) {
  if (shares_) shares_->set_gradient_scale(step_.loss_scale());
  validate(schedule_);
}

void ImageTask::start(int64_t epoch, int64_t step) {
  train_->start(epoch, step);
  train_->next(batch_);
}

at::Tensor ImageTask::step(int64_t epoch, int64_t step, StepCost* cost) {
  const int64_t global = epoch * steps() + step;
  rates_ = rates_at(schedule_, global);
  if (shares_) shares_->set_samples(batch_.indices);
  const uint64_t seed = derive_seed(options_.seed, static_cast<uint64_t>(global + 1), 0, 0);
  const at::Tensor loss = step_(batch_.images, batch_.labels, rates_, seed, cost);
  if (shares_) shares_->step();
  return loss;
}

bool ImageTask::logits_are_finite() {
  if (!batch_.images.defined()) return true;
  const at::NoGradGuard guard;
  model_->eval();
  const at::Tensor logits = model_->forward(batch_.images);
  model_->train();
  return logits.isfinite().all().item<bool>();
}

TensorMap ImageTask::state() const {
  TensorMap all = step_.state();
  if (shares_) add_shares(*shares_, all);
  return all;
}

void ImageTask::restore(const TensorMap& state) {
  TensorMap own = state;
  if (shares_) take_shares(own, *shares_, device_);
  step_.restore(own);
}

void ImageTask::add_to(RunResult& r, double steps_per_second) const {
  r.images_per_second = steps_per_second * static_cast<double>(train_->images()) / static_cast<double>(steps());
  r.batch = options_.batch;
  r.skipped_steps = step_.skipped();
  r.parameter_bytes = step_.parameter_bytes();
  if (is_baseline(options_.method) || r.tensors.empty()) r.tensors = planned_saves(options_, shape_, train_->height(), train_->width());
}

RunResult run_on_device(const ImageTrainOptions& options, const std::function<RunResult()>& train) {
  try {
    const CurrentDevice current(device_of(options.device));
    const ConvolutionSettings settings(device_of(options.device), {options.tf32, true, wants_growing_segments(options.method)});
    return train();
  } catch (const c10::Error& e) {
    if (!out_of_memory(e)) throw;
    fail("train", "model, batch and saves must fit into memory",
         options.model + ", batch " + std::to_string(options.batch) + " on " + options.device);
  }
}

}  // namespace satchel
