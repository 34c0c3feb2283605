// One training step on a batch of images, and what it costs in memory. Private to this room and tools.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "satchel/autograd/pixel_loss.h"
#include "satchel/models/image_model.h"
#include "satchel/train/image_train.h"
#include "satchel/train/optimizer.h"
#include "satchel/train/schedule.h"
#include "satchel/train/step.h"

namespace satchel {

/// While it lives, torch's functions and this library's in this thread run under autocast to that type, on a device of that kind.
class AutocastGuard {
 public:
  AutocastGuard(at::DeviceType device, Autocast type);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  at::DeviceType device_;
  bool on_, before_ = false, cache_before_ = false;
  at::ScalarType type_before_ = at::kFloat;
};

/// The model of a run from its seed, on a device: equal weights on every device and for every method.
ImageModel make_model(const ImageTrainOptions& options, const ImageShape& shape, at::Device device,
                      const std::shared_ptr<BitAllocator>& allocator = {});

/// The step of a run on images: TrainStep on a batch, under autocast, by SGD.
class ImageStep {
 public:
  /// `pixels`: of models of segmentation, but for `torch_own`, which a baseline has.
  ImageStep(ImageModel model, const ImageTrainOptions& options, at::Device device, const PixelLossOptions& pixels = {});
  ImageStep(const ImageStep&) = delete;
  ImageStep& operator=(const ImageStep&) = delete;

  /// One step from the seed: images batch × channels × height × width, labels int64[batch], or uint8 batch × height × width of
  /// segmentation. As TrainStep's otherwise.
  at::Tensor operator()(const at::Tensor& images, const at::Tensor& labels, const Rates& rates, uint64_t seed, StepCost* cost = nullptr);

  /// Logits in evaluation mode, float32; of segmentation batch × classes × height × width.
  at::Tensor evaluate(const at::Tensor& images);

  /// Steps that the loss scale left out; waits for the device.
  int64_t skipped() const { return optimizer_.loss_scale() ? optimizer_.loss_scale()->skipped() : 0; }
  /// What gradients are multiplied with in backward, one number on the device that stays up to date; undefined: 1.
  at::Tensor loss_scale() const { return optimizer_.loss_scale() ? optimizer_.loss_scale()->factor() : at::Tensor(); }
  ImageModel model() const { return model_; }
  int64_t parameter_bytes() const { return optimizer_.parameter_bytes(); }

  /// As ParameterStep's.
  std::map<std::string, at::Tensor> state() const { return optimizer_.state(); }
  void restore(const std::map<std::string, at::Tensor>& state) { optimizer_.restore(state); }

 private:
  ImageModel model_;
  at::Device device_;
  Amp amp_;
  PixelLossOptions pixels_;
  ParameterStep optimizer_;
  at::Tensor loss_of(const at::Tensor& logits, double smoothing) const;

  at::Tensor images_, labels_;  // of the step at work
  TrainStep step_;
};

}  // namespace satchel
