// What training runs on images share, whatever they learn from them: the model and its steps, bits by sample, learning rates, the state of
// a checkpoint. Private to this room.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "satchel/autograd/pixel_loss.h"
#include "satchel/plan/bit_allocator.h"
#include "satchel/train/image_feed.h"
#include "satchel/train/image_step.h"
#include "satchel/train/trainer.h"

namespace satchel {

class ImageTask : public TrainTask {
 public:
  const ImageTrainOptions& options() const { return options_; }

  int64_t steps() const override { return train_->batches(); }
  void start(int64_t epoch, int64_t step) override;
  at::Tensor step(int64_t epoch, int64_t step, StepCost* cost) override;
  void prefetch() override { train_->next(batch_); }
  double lr() const override { return rates_.lr; }
  bool validates() const override { return false; }
  /// On the images at hand, in float32: after a few steps a norm's running statistics lag, and float16 may not hold what they make of good
  /// weights.
  bool logits_are_finite() override;
  std::string advice() const override { return "a smaller lr or a warm-up may help"; }
  torch::nn::Module& model() override { return *model_; }
  TensorMap state() const override;
  void restore(const TensorMap& state) override;
  void add_to(RunResult& result, double steps_per_second) const override;

 protected:
  /// `options` have been checked, and `shape` fits the images of the feed; `samples`: images there are to train on.
  ImageTask(const ImageTrainOptions& options, at::Device device, std::unique_ptr<BatchFeed> train, const ImageShape& shape, int64_t samples,
            const PixelLossOptions& pixels = {});

  const ImageShape& shape() const { return shape_; }
  at::Device device() const { return device_; }
  ImageStep& of_step() { return step_; }

 private:
  ImageTrainOptions options_;
  at::Device device_;
  std::unique_ptr<BatchFeed> train_;
  ImageShape shape_;
  std::shared_ptr<RunningBitAllocator> shares_;
  ImageStep step_;
  ImageModel model_;
  Schedule schedule_;
  Rates rates_;
  ImageTensors batch_;  // of the next step; after an epoch's last, that one's
};

/// The device that a run's options name is the current one, and torch's convolutions are set as they say, while `train` runs. What does
/// not fit into memory is said in the run's words.
RunResult run_on_device(const ImageTrainOptions& options, const std::function<RunResult()>& train);

}  // namespace satchel
