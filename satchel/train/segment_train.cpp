#include "satchel/train/segment_train.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/noise.h"
#include "satchel/tensor/output.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/image_options.h"
#include "satchel/train/image_task.h"
#include "satchel/train/metrics.h"
#include "satchel/train/options.h"
#include "satchel/train/ranges.h"
#include "satchel/train/scene_feed.h"
#include "satchel/train/segment_task.h"

namespace satchel {
namespace {

constexpr int64_t kFileCrop = 480;      // of torchvision's references
constexpr uint32_t kSceneSeed = 2;      // rank of the seed of order and augmentation, as images'
constexpr int64_t kMostSegments = 254;  // classes that a byte tells from ignored and unknown ones

int64_t crop_of(const SceneSets& data, const SegmentTrainOptions& o) {
  return o.image > 0 ? o.image : data.train.drawn.side > 0 ? data.train.drawn.side : kFileCrop;
}

SegmentTrainOptions checked_for(const SceneSets& data, SegmentTrainOptions o) {
  if (o.amp == Amp::automatic) o.amp = Amp::none;
  validate(o);
  if (data.train.count < 1) fail("train", "data must have scenes to train on", data.train.count);
  if (data.train.classes < 2 || data.train.classes > kMostSegments)
    fail("train", "data must have 2 to " + std::to_string(kMostSegments) + " classes", data.train.classes);
  if (o.batch > data.train.count)
    fail("train", "batch must be at most the " + std::to_string(data.train.count) + " images there are", o.batch);
  if (!o.class_weights.empty() && static_cast<int64_t>(o.class_weights.size()) != data.train.classes)
    fail("train", "class weights must be one a class, " + std::to_string(data.train.classes), o.class_weights.size());
  if (!o.checkpoint.empty()) check_replaceable(o.checkpoint, "train");
  return o;
}

SceneLoaderOptions scene_training(const SceneSets& data, const SegmentTrainOptions& o) {
  SceneLoaderOptions l = scene_training_options(data, o.batch, crop_of(data, o), derive_seed(o.seed, 0, kSceneSeed, 0));
  l.least_scale = o.least_scale;
  l.most_scale = o.most_scale;
  if (!o.augment) l.crop_anywhere = l.flip = false;
  if (!o.augment) l.least_scale = l.most_scale = 1;
  l.threads = static_cast<int>(o.loaders);
  return l;
}

std::unique_ptr<BatchFeed> scene_feed_of(const SceneSets& data, const SegmentTrainOptions& o) {
  return std::make_unique<SceneFeed>(data.train, scene_training(data, o), device_of(o.device), o.channels_last);
}

PixelLossOptions loss_of(const SegmentTrainOptions& o) {
  PixelLossOptions loss;
  loss.ignored = Mask::ignored;
  loss.aux = o.aux_weight;
  if (!o.class_weights.empty()) loss.weights = at::tensor(o.class_weights, at::kDouble).to(device_of(o.device), at::kFloat);
  return loss;
}

/// Crops of scenes and their masks.
class SegmentTraining : public ImageTask {
 public:
  SegmentTraining(const SceneSets& data, const SegmentTrainOptions& own, std::unique_ptr<BatchFeed> train, const ImageShape& shape)
      : ImageTask(own, device_of(own.device), std::move(train), shape, data.train.count, loss_of(own)), data_(data), own_(own) {
    if (data.test.count > 0) test_ = std::make_unique<SceneFeed>(data.test, testing_options(data, own), device(), own.channels_last);
  }

  std::string describe() const override { return describe_options(own_, shape()); }
  std::string describe_own_data() const override { return describe_data(data_); }
  const char* format() const override { return kSegmentFormat; }
  std::string advice() const override {
    return ImageTask::advice() + "; of a batch whose pixels are all ignored, torch's loss (fp32) is nan";
  }

  Scores evaluate() override {
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    if (test_ == nullptr) return {kNone, kNone, kNone};
    const int64_t classes = data_.train.classes;
    const at::Tensor confusion = at::zeros({classes, classes}, at::TensorOptions().dtype(at::kLong).device(device()));
    ImageTensors batch;
    test_->start(0);
    while (test_->next(batch)) {
      const at::Tensor logits = of_step().evaluate(batch.images);
      // A pixel with a NaN among its logits is wrong.
      const at::Tensor other = batch.labels.to(at::kLong).add_(1).remainder_(classes);
      add_confusion(confusion, at::where(logits.isnan().any(1), other, logits.argmax(1)), batch.labels, Mask::ignored);
    }
    ious_ = class_ious(confusion);
    return {kNone, kNone, mean_iou(ious_)};
  }

  void add_to(RunResult& r, double steps_per_second) const override {
    ImageTask::add_to(r, steps_per_second);
    const std::vector<std::string> names = names_of_classes(data_.train);
    for (size_t c = 0; c < ious_.size(); ++c) r.class_scores.emplace_back(names[c], ious_[c]);
  }

 private:
  const SceneSets& data_;
  SegmentTrainOptions own_;
  std::unique_ptr<SceneFeed> test_;
  std::vector<double> ious_;  // of the last evaluation
};

}  // namespace

SceneLoaderOptions testing_options(const SceneSets& data, const SegmentTrainOptions& o) {
  SceneLoaderOptions l = scene_testing_options(data, data.test.drawn.side > 0 ? o.batch : 1);
  l.threads = static_cast<int>(o.loaders);
  return l;
}

void validate(const SegmentTrainOptions& o) {
  validate(static_cast<const ImageTrainOptions&>(o));
  if (!is_segmentation_model(o.model)) fail("train", "scenes with masks need a model of segmentation", o.model);
  check_finite_at_least("weight of the auxiliary loss", o.aux_weight, 0);
  for (const double weight : o.class_weights) check_finite_at_least("class weights", weight, 0);
  if (!(o.least_scale > 0 && o.least_scale <= o.most_scale && o.most_scale <= 16))
    fail("train", "scales must be above 0, rise, and be at most 16", o.least_scale);
  if (o.label_smoothing != 0) fail("train", "segmentation takes no label smoothing", o.label_smoothing);
}

RunResult train_segmentation(const SceneSets& data, const SegmentTrainOptions& options, const ProgressReport& progress) {
  return run_on_device(options, [&] {
    const std::optional<Checkpoint> from = checkpoint_to_resume(options, kSegmentFormat);
    const SegmentTrainOptions own = checked_for(data, options);
    std::unique_ptr<BatchFeed> train = scene_feed_of(data, own);
    const ImageShape shape = shape_of(own, data.train.classes, 3, train->height(), train->width());
    SegmentTraining task(data, own, std::move(train), shape);
    if (!from) task.load_pretrained();
    return run_task(task, task.options(), from, progress);
  });
}

}  // namespace satchel
