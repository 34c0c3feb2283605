#include "satchel/train/image_train.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/median.h"
#include "satchel/core/noise.h"
#include "satchel/plan/image_plan.h"
#include "satchel/plan/share_out.h"
#include "satchel/tensor/output.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/image_checkpoint.h"
#include "satchel/train/image_feed.h"
#include "satchel/train/image_options.h"
#include "satchel/train/image_step.h"
#include "satchel/train/late_number.h"
#include "satchel/train/memory.h"
#include "satchel/train/options.h"

namespace satchel {
namespace {

using Clock = std::chrono::steady_clock;
using Report = std::function<bool(const ImageProgress&)>;

constexpr int64_t kWatched = 3;  // first steps, whose memory is watched: the first lacks gradients that stand, the next replaces it
constexpr auto kBetweenReports = std::chrono::milliseconds(250);

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

ImageTrainOptions checked(const ImageSets& data, const ImageTrainOptions& options) {
  validate(options);
  validate(data);
  if (options.batch > data.train.count())
    fail("train", "batch must be at most the " + std::to_string(data.train.count()) + " images there are", options.batch);
  if (!options.checkpoint.empty()) check_replaceable(options.checkpoint, "train");
  return options;
}

/// A step's loss on its way to the host.
struct LateLoss {
  LateNumber loss;
  int64_t step;  // of the epoch, from 1 on
  bool watched;
};

/// Those of an epoch that have been read.
struct Losses {
  double sum = 0;
  int64_t count = 0;
  double mean() const { return sum / static_cast<double>(count); }
};

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

class Run {
 public:
  Run(const ImageSets& data, const ImageTrainOptions& asked)
      : options_(checked(data, asked)),
        device_(device_of(options_.device)),
        train_(data.train, training_options(data, options_), device_, options_.channels_last),
        shape_(checked_shape(options_, data.train, train_.loader())),
        shares_(shares_out(options_.method) ? std::make_shared<ShareOut>(ShareOutOptions{data.train.count()}) : nullptr),
        step_(make_model(with_mean(options_, shape_, train_.loader().height(), train_.loader().width()), shape_, device_, shares_),
              options_, device_) {
    if (shares_) shares_->set_gradient_scale(step_.loss_scale());
    if (data.test.count() > 0)
      test_ = std::make_unique<ImageFeed>(data.test, testing_options(data, options_), device_, options_.channels_last);
    schedule_ = schedule_of(options_, train_.loader().batches());
    validate(schedule_);
    if (!options_.checkpoint.empty()) data_ = describe_data(data);
    if (options_.resume) resume();
  }
  Run(const Run&) = delete;

  bool goes_on() const { return state_.epoch < options_.epochs; }

  /// False where the report said stop; the epoch is finished first, so that a resumed run is one run.
  bool epoch(const Report& report) {
    const auto start = Clock::now();
    auto reported = start;
    int64_t done = 0;
    bool goes_on = true;
    ImageTensors batch;
    losses_ = {};
    train_.start(state_.epoch);
    for (bool more = train_.next(batch); more;) {
      more = train(batch, ++done);
      if (!report || !goes_on || !more || losses_.count == 0 || Clock::now() - reported < kBetweenReports) continue;
      reported = Clock::now();
      goes_on = report(progress(done, losses_.mean(), seconds_since(start) / static_cast<double>(done)));
    }
    read_loss();
    const double took = seconds_since(start);
    trained_seconds_ += took;
    trained_ += train_.loader().images();
    state_.loss = losses_.mean();
    ++state_.epoch;
    if (state_.epoch == options_.epochs || !goes_on || checkpoint_due()) check_weights(batch.images);
    if (state_.epoch % options_.eval_every == 0 || state_.epoch == options_.epochs || !goes_on) evaluate();
    return (!report || report(progress(0, state_.loss, took / static_cast<double>(done)))) && goes_on;
  }

  void checkpoint_if_due() {
    if (checkpoint_due()) write();
  }

  ImageRunResult finish(bool interrupted) {
    write();
    ImageRunResult r;
    r.method = options_.method.name;
    r.seed = options_.seed;
    r.device = options_.device;
    r.test = state_.last.test;
    r.best_test = state_.best.test;
    r.best_epoch = state_.best_epoch;
    r.epochs = state_.epoch;
    r.loss = state_.loss;
    r.step_seconds = measured().epoch_seconds;
    r.images_per_second = trained_seconds_ > 0 ? static_cast<double>(trained_) / trained_seconds_ : 0;
    r.batch = options_.batch;
    r.skipped_steps = step_.skipped();
    r.saved_bytes = state_.measured.saved_bytes;
    r.loss_bytes = state_.measured.loss_bytes;
    r.peak_bytes = state_.measured.peak_bytes;
    r.parameter_bytes = step_.parameter_bytes();
    r.tensors = options_.method.plain ? planned_saves(options_, shape_, train_.loader().height(), train_.loader().width()) : tensors_;
    r.interrupted = interrupted;
    return r;
  }

 private:
  bool checkpoint_due() const { return options_.checkpoint_every > 0 && state_.epoch % options_.checkpoint_every == 0; }

  /// One step; reads the next batch into `batch` while the device works, and the loss of the step before: a device that is asked for this
  /// one's would have nothing to do until the next is queued. False where that was the epoch's last.
  bool train(ImageTensors& batch, int64_t number) {
    const bool measures = steps_ < kWatched;
    const int64_t global = state_.epoch * train_.loader().batches() + number - 1;
    StepCost cost;
    if (!late_) last_read_ = Clock::now();
    rates_ = rates_at(schedule_, global);
    if (shares_) shares_->set_samples(batch.indices);
    const uint64_t seed = derive_seed(options_.seed, static_cast<uint64_t>(global + 1), 0, 0);
    const at::Tensor loss = step_(batch.images, batch.labels, rates_, seed, measures ? &cost : nullptr);
    if (shares_) shares_->step();
    LateLoss now{LateNumber(loss), number, measures};
    const bool more = train_.next(batch);
    read_loss();
    late_.emplace(std::move(now));
    if (measures) read_loss();
    ++steps_;
    if (measures) keep(std::move(cost));
    return more;
  }

  /// Of the step whose loss is still on its way, if any. Before an epoch ends, is reported or becomes a checkpoint, all have been read.
  void read_loss() {
    if (!late_) return;
    const LateLoss late = std::move(*late_);
    late_.reset();
    const double loss = late.loss.read();
    (late.watched ? watched_seconds_ : seconds_).push_back(seconds_since(last_read_));
    last_read_ = Clock::now();
    if (!std::isfinite(loss)) {
      refuse("loss", std::isnan(loss) ? "nan" : "infinity",
             "at epoch " + std::to_string(state_.epoch + 1) + ", step " + std::to_string(late.step));
    }
    losses_.sum += loss;
    ++losses_.count;
  }

  /// A step's loss is older than the weights that it leaves: those of an epoch's last are tried on its own images. In float32: after a
  /// few steps a norm's running statistics lag, and float16 may not hold what they make of good weights.
  void check_weights(const at::Tensor& images) {
    const at::NoGradGuard guard;
    ImageModel model = step_.model();
    model->eval();
    const at::Tensor logits = model->forward(images);
    model->train();
    if (!logits.isfinite().all().item<bool>())
      refuse("logits", "nan or infinity",
             "after epoch " + std::to_string(state_.epoch) + (state_.epoch == options_.epochs ? ", the last" : ""));
  }

  [[noreturn]] void refuse(const std::string& what, const std::string& got, const std::string& when) const {
    fail("train", what + " must be finite (" + options_.method.name + "; a smaller lr or a warm-up may help)", got + " " + when);
  }

  void evaluate() {
    state_.last.test = test_ == nullptr ? std::numeric_limits<double>::quiet_NaN() : accuracy();
    if (state_.best_epoch != 0 && !(state_.last.test > state_.best.test)) return;
    state_.best = state_.last;
    state_.best_epoch = state_.epoch;
  }

  /// Percent of the test images whose largest logit is their label's; an image with a NaN among its logits is wrong.
  double accuracy() {
    at::Tensor hits = at::zeros({}, at::TensorOptions().dtype(at::kLong).device(device_));
    ImageTensors batch;
    test_->start(0);
    while (test_->next(batch)) {
      const at::Tensor logits = step_.evaluate(batch.images);
      hits += (logits.argmax(1).eq(batch.labels).logical_and(logits.isnan().any(1).logical_not())).sum();
    }
    return 100.0 * static_cast<double>(hits.item<int64_t>()) / static_cast<double>(test_->loader().images());
  }

  ImageProgress progress(int64_t done, double loss, double step_seconds) const {
    return {state_.epoch,
            options_.epochs,
            done,
            done > 0 ? train_.loader().batches() : 0,
            loss,
            state_.best_epoch == 0 ? std::numeric_limits<double>::quiet_NaN() : state_.last.test,
            rates_.lr,
            step_seconds,
            state_.measured.saved_bytes,
            state_.measured.peak_bytes};
  }

  Measured measured() const {
    Measured m = state_.measured;
    if (!seconds_.empty() || !watched_seconds_.empty()) m.epoch_seconds = median(seconds_.empty() ? watched_seconds_ : seconds_);
    return m;
  }

  void keep(StepCost cost) {
    state_.measured = {cost.saved_bytes, cost.loss_bytes, std::max(steps_ > 2 ? state_.measured.peak_bytes : 0, cost.peak_bytes), 0};
    tensors_ = std::move(cost.tensors);
  }

  void resume() {
    const Checkpoint c = read_checkpoint(options_.checkpoint, kImageFormat);
    check_equal(c.options, describe_options(options_, shape_), "options");
    check_equal(c.data, data_, "data");
    if (c.state.epoch > options_.epochs)
      fail("resume", "epochs must be at least the " + std::to_string(c.state.epoch) + " done", options_.epochs);
    state_ = c.state;
    ImageModel model = step_.model();
    set_weights(*model, c.model);
    TensorMap optimizer = c.optimizer;
    if (shares_) take_shares(optimizer, *shares_, device_);
    step_.restore(optimizer);
  }

  void write() const {
    if (options_.checkpoint.empty()) return;
    Checkpoint c{describe_options(options_, shape_), data_, state_, weights_of(*step_.model()), {}, {}, kImageFormat};
    for (const auto& [name, tensor] : step_.state()) c.optimizer[name] = tensor.to(at::kCPU);
    if (shares_) add_shares(*shares_, c.optimizer);
    c.state.measured = measured();
    c.state.use_last = true;
    write_checkpoint(options_.checkpoint, c);
  }

  ImageTrainOptions options_;
  at::Device device_;
  ImageFeed train_;
  ImageShape shape_;
  std::shared_ptr<ShareOut> shares_;
  ImageStep step_;
  std::unique_ptr<ImageFeed> test_;
  Schedule schedule_;
  Rates rates_;
  std::string data_;
  RunState state_;
  std::vector<SavedTensor> tensors_;
  std::vector<double> seconds_, watched_seconds_;  // of steps as most are, and of the first ones
  std::optional<LateLoss> late_;
  Losses losses_;
  Clock::time_point last_read_;  // the end of a step, or the beginning where none was under way
  double trained_seconds_ = 0;
  int64_t steps_ = 0, trained_ = 0;  // of this session
};

}  // namespace

ImageRunResult train_images(const ImageSets& data, const ImageTrainOptions& options, const Report& progress) {
  try {
    const CurrentDevice current(device_of(options.device));
    const ConvolutionSettings settings(device_of(options.device), {options.tf32, true, wants_growing_segments(options.method)});
    Run run(data, options);
    bool stopped = false;
    while (!stopped && run.goes_on()) {
      stopped = !run.epoch(progress);
      run.checkpoint_if_due();
    }
    return run.finish(stopped);
  } catch (const c10::Error& e) {
    if (!out_of_memory(e)) throw;
    fail("train", "model, batch and saves must fit into memory",
         options.model + ", batch " + std::to_string(options.batch) + " on " + options.device);
  }
}

}  // namespace satchel
