#include "satchel/train/image_train.h"

#include <ATen/ops/zeros.h>

#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/tensor/output.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/image_checkpoint.h"
#include "satchel/train/image_feed.h"
#include "satchel/train/image_options.h"
#include "satchel/train/image_task.h"
#include "satchel/train/options.h"
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
ImageShape checked_shape(const ImageTrainOptions& options, const ImageData& data, const BatchFeed& images) {
  const ImageShape shape = shape_of(options, data.classes, data.channels, images.height(), images.width());
  check_side(shape, images.height(), images.width(), "train");
  return shape;
}

std::unique_ptr<BatchFeed> feed_of(const ImageSets& data, const ImageTrainOptions& options) {
  return std::make_unique<ImageFeed>(data.train, training_options(data, options), device_of(options.device), options.channels_last);
}

/// Images in batches and their classes.
class ImageTraining : public ImageTask {
 public:
  ImageTraining(const ImageSets& data, const ImageTrainOptions& options, std::unique_ptr<BatchFeed> train, const ImageShape& shape)
      : ImageTask(options, device_of(options.device), std::move(train), shape, data.train.count()), data_(data) {
    if (data.test.count() > 0)
      test_ = std::make_unique<ImageFeed>(data.test, testing_options(data, options), device(), options.channels_last);
  }

  std::string describe() const override { return describe_options(options(), shape()); }
  std::string describe_own_data() const override { return describe_data(data_); }
  const char* format() const override { return kImageFormat; }

  /// Percent of the test images whose largest logit is their label's; an image with a NaN among its logits is wrong.
  Scores evaluate() override {
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    if (test_ == nullptr) return {kNone, kNone, kNone};
    at::Tensor hits = at::zeros({}, at::TensorOptions().dtype(at::kLong).device(device()));
    ImageTensors batch;
    test_->start(0);
    while (test_->next(batch)) {
      const at::Tensor logits = of_step().evaluate(batch.images);
      hits += (logits.argmax(1).eq(batch.labels).logical_and(logits.isnan().any(1).logical_not())).sum();
    }
    return {kNone, kNone, 100.0 * static_cast<double>(hits.item<int64_t>()) / static_cast<double>(test_->images())};
  }

 private:
  const ImageSets& data_;
  std::unique_ptr<ImageFeed> test_;
};

}  // namespace

RunResult train_images(const ImageSets& data, const ImageTrainOptions& options, const ProgressReport& progress) {
  return run_on_device(options, [&] {
    const std::optional<Checkpoint> from = checkpoint_to_resume(options, kImageFormat);
    const ImageTrainOptions own = checked(data, options);
    std::unique_ptr<BatchFeed> train = feed_of(data, own);
    const ImageShape shape = checked_shape(own, data.train, *train);
    ImageTraining task(data, own, std::move(train), shape);
    return run_task(task, task.options(), from, progress);
  });
}

}  // namespace satchel
