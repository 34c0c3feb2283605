#include "satchel/train/detect_train.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/keep.h"
#include "satchel/core/noise.h"
#include "satchel/plan/bit_allocator.h"
#include "satchel/tensor/output.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/detect_checkpoint.h"
#include "satchel/train/detect_step.h"
#include "satchel/train/image_checkpoint.h"
#include "satchel/train/image_options.h"
#include "satchel/train/memory.h"
#include "satchel/train/options.h"
#include "satchel/train/pretrained.h"
#include "satchel/train/ranges.h"
#include "satchel/train/trainer.h"

namespace satchel {
namespace {

constexpr double kNoScore = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kMostPixels = 1 << 13;  // of a side

DetectTrainOptions checked_scenes(const SceneSets& data, DetectTrainOptions options) {
  if (options.amp == Amp::automatic) options.amp = Amp::none;
  validate(options);
  if (data.train.count < 1) fail("train", "data must have scenes to train on", data.train.count);
  if (data.train.classes < 1) fail("train", "data must have at least 1 class of objects", data.train.classes);
  if (data.test.count > 0 && data.test.classes > data.train.classes)
    fail("train", "test scenes must be of the " + std::to_string(data.train.classes) + " classes", data.test.classes);
  if (options.batch > data.train.count)
    fail("train", "batch must be at most the " + std::to_string(data.train.count) + " scenes there are", options.batch);
  if (!options.checkpoint.empty()) check_replaceable(options.checkpoint, "train");
  return options;
}

std::vector<std::pair<std::string, double>> named_scores(const BoxScores& s) {
  std::vector<std::pair<std::string, double>> all;
  for (const auto& [name, value] : {std::pair{"ap", s.ap},
                                    {"ap50", s.ap50},
                                    {"ap75", s.ap75},
                                    {"ap_small", s.ap_small},
                                    {"ap_medium", s.ap_medium},
                                    {"ap_large", s.ap_large},
                                    {"recall1", s.recall1},
                                    {"recall10", s.recall10},
                                    {"recall100", s.recall100},
                                    {"recall_small", s.recall_small},
                                    {"recall_medium", s.recall_medium},
                                    {"recall_large", s.recall_large}})
    all.emplace_back(name, 100 * value);
  return all;
}

/// Scenes in batches and their detector.
class DetectTraining : public TrainTask {
 public:
  DetectTraining(const SceneSets& data, const DetectTrainOptions& asked)
      : data_(data),
        options_(checked_scenes(data, asked)),
        device_(device_of(options_.device)),
        shape_(satchel::shape_of(options_, data.train.classes)),
        first_class_(first_class_of(options_.model)),
        train_(data.train, detect_training_options(data, options_), device_, options_.channels_last, first_class_),
        shares_(allocates_bits(options_.method) ? std::make_shared<RunningBitAllocator>(BitAllocatorOptions{data.train.count}) : nullptr),
        step_(make_detector(options_, shape_, device_, shares_), options_, device_),
        model_(step_.model()),
        schedule_(schedule_of(options_, train_.loader().batches())) {
    if (shares_) shares_->set_gradient_scale(step_.loss_scale());
    if (data.test.count > 0) {
      test_ = std::make_unique<BoxFeed>(data.test, detect_testing_options(data.mean, data.deviation, options_), device_,
                                        options_.channels_last, first_class_);
    }
    validate(schedule_);
  }

  const DetectTrainOptions& options() const { return options_; }
  void load_pretrained() {
    if (!options_.weights.empty()) load_weights(*model_, shape_, options_.weights);
  }
  std::string describe() const override { return describe_options(options_, shape_); }
  std::string describe_own_data() const override { return describe_boxes(data_); }
  const char* format() const override { return kDetectFormat; }

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
    const at::Tensor loss = step_(batch_.images, batch_.targets, rates_, seed, cost);
    if (shares_) shares_->step();
    return loss;
  }
  void prefetch() override { train_.next(batch_); }
  double lr() const override { return rates_.lr; }

  Scores evaluate() override {
    if (test_ == nullptr) return {kNoScore, kNoScore, kNoScore};
    BoxScorer scorer(data_.train.classes);
    BoxTensors batch;
    test_->start(0);
    while (test_->next(batch)) {
      const auto found = found_in(model_, batch, device_, options_.amp, first_class_);
      for (size_t i = 0; i < found.size(); ++i) scorer.add(own_objects(data_.test, batch.host, i), found[i]);
    }
    scores_ = scorer.scores();
    return {kNoScore, kNoScore, 100 * scores_->ap};
  }
  bool validates() const override { return false; }
  bool logits_are_finite() override {
    if (!batch_.images.defined()) return true;
    const at::NoGradGuard guard;
    model_->eval();
    const DetectorOutputs outputs = model_->forward(batch_.images, batch_.targets);
    model_->train();
    for (const at::Tensor& map : outputs.maps) {
      if (!map.isfinite().all().item<bool>()) return false;
    }
    return true;
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
    r.images_per_second = steps_per_second * static_cast<double>(train_.loader().scenes()) / static_cast<double>(steps());
    r.batch = options_.batch;
    r.skipped_steps = step_.skipped();
    r.parameter_bytes = step_.parameter_bytes();
    if (scores_) r.more_scores = named_scores(*scores_);
    // torch's own saves have no names; those of Faster R-CNN also depend on how many boxes there were.
    if (is_baseline(options_.method) && !has_regions(shape_.name) && batch_.images.defined()) {
      const BatchShape batch{options_.batch, batch_.images.size(2), batch_.images.size(3), is_half(options_.amp)};
      r.tensors = plan_detector(shape_, batch, options_.method);
    }
  }

 private:
  const SceneSets& data_;
  DetectTrainOptions options_;
  at::Device device_;
  DetectorShape shape_;
  int64_t first_class_;
  BoxFeed train_;
  std::shared_ptr<RunningBitAllocator> shares_;
  DetectStep step_;
  Detector model_;
  std::unique_ptr<BoxFeed> test_;
  Schedule schedule_;
  Rates rates_;
  BoxTensors batch_;  // of the next step; after an epoch's last, that one's
  std::optional<BoxScores> scores_;
};

}  // namespace

void validate(const DetectTrainOptions& o) {
  validate(as_images(o));
  validate(shape_of(o, 1), "train");
  if (!o.freeze.empty()) fail("train", "a detector's stages are frozen by trainable (--trainable), not by name", o.freeze);
  if (budget_of(o.method) > 0) fail("train", "a budget is for image classifiers", o.method.name);
  for (const int64_t side : o.sides) check_between("a side", side, 1, kMostPixels);
  check_finite_at_least("the largest norm of gradients", o.max_norm, 0);
  check_between("the longest side", o.longest, 1, kMostPixels);
}

RunResult train_detector(const SceneSets& data, const DetectTrainOptions& options, const ProgressReport& progress) {
  try {
    const CurrentDevice current(device_of(options.device));
    const ConvolutionSettings settings(device_of(options.device), {options.tf32, true, wants_growing_segments(options.method)});
    const std::optional<Checkpoint> from = checkpoint_to_resume(options, kDetectFormat);
    DetectTraining task(data, options);
    if (!from) task.load_pretrained();
    return run_task(task, task.options(), from, progress);
  } catch (const c10::Error& e) {
    if (!out_of_memory(e)) throw;
    fail("train", "model, batch and saves must fit into memory",
         options.model + ", batch " + std::to_string(options.batch) + " on " + options.device);
  }
}

FoundBoxes predict_boxes(const SceneData& data, bool labelled, const std::string& checkpoint, const std::string& device_name,
                         int64_t loaders) {
  if (data.count < 1) fail("predict", "data must have scenes", data.count);
  const Checkpoint c = read_checkpoint(checkpoint, kDetectFormat);
  DetectorShape shape;
  DetectTrainOptions o = parse_detect_options(c.options, shape);
  const TrainedScenes trained = parse_boxes_data(c.data);
  o.method = parse_method("fp32");  // nothing is kept for backward
  o.device = device_name;
  o.tf32 = o.tf32 && names_cuda(device_name);
  o.loaders = loaders;
  validate(shape, "checkpoint");
  const int64_t first = first_class_of(shape.name), classes = shape.classes - first;
  if (labelled && data.classes > classes) fail("predict", "scenes must be of the " + std::to_string(classes) + " classes", data.classes);
  const at::Device device = device_of(device_name, "predict");
  const CurrentDevice current(device);
  const ConvolutionSettings settings(device, {o.tf32, true, false});
  BoxFeed feed(data, detect_testing_options(trained.mean, trained.deviation, o), device, o.channels_last, first);
  Detector model = make_detector(o, shape, device);
  set_weights(*model, c.model);
  FoundBoxes result{{}, {}, trained.class_names, trained.category_ids};
  BoxScorer scorer(classes);
  BoxTensors batch;
  feed.start(0);
  while (feed.next(batch)) {
    auto found = found_in(model, batch, device, o.amp, first);
    for (size_t i = 0; i < found.size(); ++i) {
      if (labelled) scorer.add(own_objects(data, batch.host, i), found[i]);
      result.scenes.push_back(std::move(found[i]));
    }
  }
  result.scores = scorer.scores();
  return result;
}

}  // namespace satchel
