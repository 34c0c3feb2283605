#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "satchel/autograd/seeds.h"
#include "satchel/core/error.h"
#include "satchel/plan/bit_allocator.h"
#include "satchel/plan/image_plan.h"
#include "satchel/train/image_checkpoint.h"
#include "satchel/train/image_feed.h"
#include "satchel/train/image_options.h"
#include "satchel/train/image_step.h"
#include "satchel/train/options.h"
#include "tools/analyse_subject.h"
#include "tools/tool.h"
#include "tools/train_images.h"

namespace satchel::tool {
namespace {

ImageTrainOptions image_options(const SubjectOptions& s) {
  ImageTrainOptions o;
  o.model = s.model;
  o.width = s.width;
  o.batch = s.batch;
  o.dropout = s.dropout;
  if (s.lr) o.lr = *s.lr;
  o.epochs = std::max<int64_t>(s.epochs, 1);
  o.seed = s.seed;
  o.device = s.device;
  o.loaders = s.loaders;
  o.method = parse_method("fp32");
  return o;
}

class ImageSubject : public Subject {
 public:
  explicit ImageSubject(const SubjectOptions& s) : device_(device_of(s.device, "analyse")) {
    refuse_graph("analyse", s.data, s.checkpoint.empty() ? s.model : s.checkpoint);
    sets_ = load_images(s.data);
    if (s.checkpoint.empty()) {
      start_fresh(s);
    } else {
      take(read_checkpoint(s.checkpoint, kImageFormat));
    }
    options_.device = s.device;
    options_.tf32 = false;
    options_.amp = Amp::none;
    options_.method = parse_method("fp32");
    options_.loaders = s.loaders;
    check_data();
    options_.batch = std::min(options_.batch, sets_.train.count());
    feed_ = std::make_unique<ImageFeed>(sets_.train, satchel::training_options(sets_, options_), device_, options_.channels_last);
    check_side(shape_, feed_->loader().height(), feed_->loader().width(), "analyse");
  }

  bool is_graph() const override { return false; }
  std::string model() const override { return fmt::format("{}, width {}, batch {}", shape_.name, shape_.width, options_.batch); }
  std::string data() const override { return sets_.train.name; }
  int64_t epochs() const override { return epochs_; }
  int64_t reference() const override { return 0; }
  const char* parts_name() const override { return "batches"; }

  void forward(const SaveReport& report) override {
    ImageModel model = made(parse_method("actnn,bits=32,adaptive=no"), shape_.dropout, nullptr);
    const ImageTensors& batch = batch_of(0);
    const SaveWatch watch(report);
    const SeedRun seeds(options_.seed);
    model->forward(batch.images);
  }

  std::vector<std::string> weights() const override { return parameter_names(*made(options_.method, 0, nullptr)); }

  std::vector<at::Tensor> gradients(const Method& method, uint64_t seed, int64_t part) override {
    const ImageTensors& batch = batch_of(part);
    if (!model_ || model_method_ != method.name) {
      allocator_ = allocates_bits(method) ? std::make_shared<RunningBitAllocator>(BitAllocatorOptions{sets_.train.count()}) : nullptr;
      model_ = made(method, 0, allocator_);
      model_method_ = method.name;
      if (allocator_) warm_up(batch);
    }
    return pass(batch, seed);
  }

 private:
  static constexpr uint64_t kWarmUps = 4;  // steps until an allocation by layer is obeyed

  std::vector<at::Tensor> pass(const ImageTensors& batch, uint64_t seed) {
    if (allocator_) allocator_->set_samples(batch.indices);
    const SeedRun seeds(seed);
    const at::Tensor logits = model_->forward(batch.images).to(at::kFloat);
    std::vector<at::Tensor> g =
        parameter_gradients(*model_, at::cross_entropy_loss(logits, batch.labels, {}, at::Reduction::Mean, -100, options_.label_smoothing));
    if (allocator_) allocator_->step();
    return g;
  }
  void warm_up(const ImageTensors& batch) {
    for (uint64_t i = 0; i < kWarmUps; ++i) pass(batch, UINT64_MAX - i);
  }

  void start_fresh(const SubjectOptions& s) {
    options_ = image_options(s);
    options_.batch = std::min(options_.batch, sets_.train.count());
    if (s.epochs == 0) {
      const ImageFeed feed(sets_.train, satchel::training_options(sets_, options_), at::kCPU, options_.channels_last);
      shape_ = shape_of(options_, sets_.train.classes, sets_.train.channels, feed.loader().height(), feed.loader().width());
      weights_ = weights_of(*make_model(options_, shape_, at::kCPU));
      return;
    }
    if (!s.quiet) fmt::print("training {} for {} {} …\n", options_.model, s.epochs, s.epochs == 1 ? "epoch" : "epochs");
    std::fflush(stdout);
    take(trained_checkpoint(kImageFormat, [&](const std::string& path) {
      options_.checkpoint = path;
      train_images(sets_, options_);
    }));
    options_.checkpoint.clear();
  }

  void take(Checkpoint c) {
    options_ = parse_options(c.options, shape_);
    options_.epochs = std::max<int64_t>(c.state.epoch, 1);
    options_.schedule = Decay::none;  // no learning rate moves
    options_.warmup = 0;
    options_.milestones.clear();
    epochs_ = c.state.epoch;
    weights_ = std::move(c.model);
  }

  void check_data() const {
    if (sets_.train.channels != shape_.channels)
      fail("analyse", fmt::format("images must have {} channels, as the checkpoint's", shape_.channels), sets_.train.channels);
    if (sets_.train.classes != shape_.classes)
      fail("analyse", fmt::format("data must have the {} classes of the checkpoint", shape_.classes), sets_.train.classes);
    validate(options_);
    validate(sets_);
  }

  ImageModel made(const Method& method, std::optional<double> dropout, const std::shared_ptr<BitAllocator>& allocator) const {
    ImageTrainOptions o = options_;
    ImageShape shape = shape_;
    shape.dropout = dropout;
    o.method = satchel::with_mean(shape, {options_.batch, feed_->loader().height(), feed_->loader().width()}, method);
    ImageModel model = make_model(o, shape, device_, allocator);
    set_weights(*model, weights_);
    model->train();
    return model;
  }

  /// The batch of that number in the first epoch, and the next ones where there are more.
  const ImageTensors& batch_of(int64_t number) {
    if (number == at_) return batch_;
    const int64_t batches = feed_->loader().batches();
    feed_->start(number / batches, number % batches);
    if (!feed_->next(batch_)) fail("analyse", "there must be a batch of training images", number);
    at_ = number;
    return batch_;
  }

  at::Device device_;
  ImageSets sets_;
  ImageTrainOptions options_;
  ImageShape shape_;
  TensorMap weights_;
  int64_t epochs_ = 0, at_ = -1;
  std::unique_ptr<ImageFeed> feed_;
  ImageTensors batch_;
  ImageModel model_ = nullptr;
  std::string model_method_;
  std::shared_ptr<RunningBitAllocator> allocator_;
};

}  // namespace

std::unique_ptr<Subject> image_subject(const SubjectOptions& options) { return std::make_unique<ImageSubject>(options); }

}  // namespace satchel::tool
