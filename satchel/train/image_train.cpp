#include "satchel/train/image_train.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/noise.h"
#include "satchel/plan/bit_allocator.h"
#include "satchel/plan/image_plan.h"
#include "satchel/tensor/output.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/image_checkpoint.h"
#include "satchel/train/image_feed.h"
#include "satchel/train/image_options.h"
#include "satchel/train/image_step.h"
#include "satchel/train/memory.h"
#include "satchel/train/options.h"
#include "satchel/train/pretrained.h"
#include "satchel/train/trainer.h"

namespace satchel {
namespace {

ImageTrainOptions checked(const ImageSets& data, ImageTrainOptions options) {
  if (options.amp == Amp::automatic) options.amp = Amp::none;
  validate(options);
  validate(data);
  if (options.batch > data.train.count())
    fail("train", "batch must be at most the " + std::to_string(data.train.count()) + " images there are", options.batch);
  if (!options.checkpoint.empty()) check_replaceable(options.checkpoint, "train");
  return options;
}

/// The model's shape for the images of the feed, which must fit it.
ImageShape checked_shape(const ImageTrainOptions& options, const ImageData& data, const ImageLoader& images) {
  const ImageShape shape = shape_of(options, data.classes, data.channels, images.height(), images.width());
  check_side(shape, images.height(), images.width(), "train");
  return shape;
}

/// A budget becomes the mean that the plan finds for it.
ImageTrainOptions with_mean(ImageTrainOptions options, const ImageShape& shape, int64_t height, int64_t width) {
  options.method = satchel::with_mean(shape, {options.batch, height, width}, options.method);
  return options;
}

/// Images in batches and their model.
class ImageTraining : public TrainTask {
 public:
  ImageTraining(const ImageSets& data, const ImageTrainOptions& asked)
      : data_(data),
        options_(checked(data, asked)),
        device_(device_of(options_.device)),
        train_(data.train, training_options(data, options_), device_, options_.channels_last),
        shape_(checked_shape(options_, data.train, train_.loader())),
        shares_(allocates_bits(options_.method) ? std::make_shared<RunningBitAllocator>(BitAllocatorOptions{data.train.count()}) : nullptr),
        step_(make_model(with_mean(options_, shape_, train_.loader().height(), train_.loader().width()), shape_, device_, shares_),
              options_, device_),
        model_(step_.model()),
        schedule_(schedule_of(options_, train_.loader().batches())) {
    if (shares_) shares_->set_gradient_scale(step_.loss_scale());
    if (data.test.count() > 0)
      test_ = std::make_unique<ImageFeed>(data.test, testing_options(data, options_), device_, options_.channels_last);
    validate(schedule_);
  }

  const ImageTrainOptions& options() const { return options_; }
  /// Starts from the weights that the options name, where they name any.
  void load_pretrained() {
    if (!options_.weights.empty()) load_weights(*model_, shape_, options_.weights);
  }

  std::string describe() const override { return describe_options(options_, shape_); }
  std::string read_options(const std::string& json) const override { return with_later_options(json); }
  std::string describe_own_data() const override { return describe_data(data_); }
  const char* format() const override { return kImageFormat; }

  int64_t steps() const override { return train_.loader().batches(); }
  void start(int64_t epoch, int64_t step) override {
    train_.start(epoch, step);
    train_.next(batch_);
  }
  at::Tensor step(int64_t epoch, int64_t step, StepCost* cost) override {
    const int64_t global = epoch * steps() + step;
    rates_ = rates_at(schedule_, global);
    if (shares_) shares_->set_samples(batch_.indices);
    const uint64_t seed = derive_seed(options_.seed, static_cast<uint64_t>(global + 1), 0, 0);
    const at::Tensor loss = step_(batch_.images, batch_.labels, rates_, seed, cost);
    if (shares_) shares_->step();
    return loss;
  }
  void prefetch() override { train_.next(batch_); }
  double lr() const override { return rates_.lr; }

  /// Percent of the test images whose largest logit is their label's; an image with a NaN among its logits is wrong.
  Scores evaluate() override {
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    if (test_ == nullptr) return {kNone, kNone, kNone};
    at::Tensor hits = at::zeros({}, at::TensorOptions().dtype(at::kLong).device(device_));
    ImageTensors batch;
    test_->start(0);
    while (test_->next(batch)) {
      const at::Tensor logits = step_.evaluate(batch.images);
      hits += (logits.argmax(1).eq(batch.labels).logical_and(logits.isnan().any(1).logical_not())).sum();
    }
    return {kNone, kNone, 100.0 * static_cast<double>(hits.item<int64_t>()) / static_cast<double>(test_->loader().images())};
  }
  bool validates() const override { return false; }
  /// On the images at hand, in float32: after a few steps a norm's running statistics lag, and float16 may not hold what they make of good
  /// weights.
  bool logits_are_finite() override {
    if (!batch_.images.defined()) return true;
    const at::NoGradGuard guard;
    model_->eval();
    const at::Tensor logits = model_->forward(batch_.images);
    model_->train();
    return logits.isfinite().all().item<bool>();
  }
  std::string advice() const override { return "a smaller lr or a warm-up may help"; }

  torch::nn::Module& model() override { return *model_; }
  TensorMap state() const override {
    TensorMap all = step_.state();
    if (shares_) add_shares(*shares_, all);
    return all;
  }
  void restore(const TensorMap& state) override {
    TensorMap own = state;
    if (shares_) take_shares(own, *shares_, device_);
    step_.restore(own);
  }

  void add_to(RunResult& r, double steps_per_second) const override {
    r.images_per_second = steps_per_second * static_cast<double>(train_.loader().images()) / static_cast<double>(steps());
    r.batch = options_.batch;
    r.skipped_steps = step_.skipped();
    r.parameter_bytes = step_.parameter_bytes();
    if (is_baseline(options_.method) || r.tensors.empty())
      r.tensors = planned_saves(options_, shape_, train_.loader().height(), train_.loader().width());
  }

 private:
  const ImageSets& data_;
  ImageTrainOptions options_;
  at::Device device_;
  ImageFeed train_;
  ImageShape shape_;
  std::shared_ptr<RunningBitAllocator> shares_;
  ImageStep step_;
  ImageModel model_;
  std::unique_ptr<ImageFeed> test_;
  Schedule schedule_;
  Rates rates_;
  ImageTensors batch_;  // of the next step; after an epoch's last, that one's
};

}  // namespace

RunResult train_images(const ImageSets& data, const ImageTrainOptions& options, const ProgressReport& progress) {
  try {
    const CurrentDevice current(device_of(options.device));
    const ConvolutionSettings settings(device_of(options.device), {options.tf32, true, wants_growing_segments(options.method)});
    const std::optional<Checkpoint> from = checkpoint_to_resume(options, kImageFormat);
    ImageTraining task(data, options);
    if (!from) task.load_pretrained();
    return run_task(task, task.options(), from, progress);
  } catch (const c10::Error& e) {
    if (!out_of_memory(e)) throw;
    fail("train", "model, batch and saves must fit into memory",
         options.model + ", batch " + std::to_string(options.batch) + " on " + options.device);
  }
}

}  // namespace satchel
