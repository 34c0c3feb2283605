// One training step on a batch of images, and what it costs in memory. Private to this room and tools.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "satchel/models/image_model.h"
#include "satchel/train/image_train.h"
#include "satchel/train/loss_scale.h"
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
                      const std::shared_ptr<BitShares>& shares = {});

/// Forward, loss, backward, SGD: the step that a run repeats. On CUDA nothing in it waits for the GPU, and its seeds, as many as the
/// step before took, get there by one copy.
class ImageStep {
 public:
  ImageStep(ImageModel model, const ImageTrainOptions& options, at::Device device);

  /// One step from the seed: images batch × channels × height × width, labels int64[batch]. Returns the loss where it was computed;
  /// reading it waits for the step. Where `cost` is given, memory is watched; the numbers that come out are the same.
  at::Tensor operator()(const at::Tensor& images, const at::Tensor& labels, const Rates& rates, uint64_t seed, StepCost* cost = nullptr);

  /// Logits in evaluation mode, float32.
  at::Tensor evaluate(const at::Tensor& images);

  /// Steps that the loss scale left out; waits for the device.
  int64_t skipped() const { return scaler_ ? scaler_->skipped() : 0; }
  /// What gradients are multiplied with in backward, one number on the device that stays up to date; undefined: 1.
  at::Tensor loss_scale() const { return scaler_ ? scaler_->factor() : at::Tensor(); }
  ImageModel model() const { return model_; }
  /// Bytes of parameters.
  int64_t parameter_bytes() const;

  /// What the next step reads: "0.momentum", …, and the loss scale's.
  std::map<std::string, at::Tensor> state() const;
  /// Throws `[resume] …` unless names and shapes are those of state().
  void restore(const std::map<std::string, at::Tensor>& state);

 private:
  at::Tensor forward_to_optimizer(const at::Tensor& images, const at::Tensor& labels, const Rates& rates, MemoryMeter* meter,
                                  StepCost* cost);
  void move(const Rates& rates);

  ImageModel model_;
  ImageTrainOptions options_;
  at::Device device_;
  std::vector<at::Tensor> parameters_, momentum_;
  std::optional<LossScaler> scaler_;
  int64_t seeds_ = 0;  // of the step before
};

}  // namespace satchel
