// Training on images end to end, small: it learns, resumes bit for bit, measures what it says, and refuses what it should.
#include "satchel/train/image_train.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <stdexcept>

#include "satchel/core/error.h"
#include "satchel/data/synthetic_images.h"
#include "satchel/plan/bit_allocator.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/image_feed.h"
#include "satchel/train/image_options.h"
#include "satchel/train/image_step.h"
#include "satchel/train/loss_scale.h"
#include "satchel/train/safetensors.h"
#include "tests/train/train_common.h"

namespace satchel {
namespace {

using train_test::expect_refused;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const ImageSets& images() {
  static const ImageSets sets = [] {
    SyntheticImageOptions o;
    o.classes = 4;
    o.size = 16;
    o.count = 192;
    o.test = 96;
    return make_synthetic_images(o);
  }();
  return sets;
}

ImageTrainOptions small(const std::string& method, int64_t epochs = 2) {
  ImageTrainOptions o;
  o.method = parse_method(method);
  o.width = 8;
  o.epochs = epochs;
  o.batch = 32;
  o.lr = 0.05;
  o.seed = 3;
  return o;
}

class ImageTrain : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { std::remove(file_.c_str()); }
  std::string file_ = testing::TempDir() + "satchel_images_" + std::to_string(getpid()) + ".safetensors";
};

TEST_F(ImageTrain, EveryMethodLearns) {
  for (const char* method : {"fp32", "actnn", "division", "satchel"}) {
    ImageTrainOptions options = small(method, 8);
    options.schedule = Decay::onecycle;
    options.batch = 16;
    options.augment = false;
    std::vector<double> losses;
    const ImageRunResult r = train_images(images(), options, [&](const ImageProgress& p) {
      if (p.step == 0) losses.push_back(p.loss);
      return true;
    });
    ASSERT_EQ(losses.size(), 8u);
    EXPECT_LT(losses.back(), losses.front()) << method;
    // By chance 25 % of 96 images are right, with a standard deviation of √(96·¼·¾) = 4.2 images: 45 % is 4.5 deviations above.
    EXPECT_GT(r.test, 45) << method;
    EXPECT_EQ(r.epochs, 8);
    EXPECT_GE(r.best_test, r.test);
    EXPECT_GT(r.images_per_second, 0);
    EXPECT_GT(r.step_seconds, 0);
    EXPECT_EQ(r.skipped_steps, 0);
  }
}

/// One or two images a batch: the last maps have 4 values a channel and image, of deviations that differ by channel.
TEST_F(ImageTrain, BatchesOfOneAndTwoStayFinite) {
  SyntheticImageOptions few;
  few.classes = 4;
  few.size = 16;
  few.count = 40;
  few.test = 8;
  const ImageSets sets = make_synthetic_images(few);
  for (const char* method : {"actnn", "actnn,adaptive=no", "exact"}) {
    for (const int64_t batch : {1, 2}) {
      ImageTrainOptions options = small(method, 1);
      options.batch = batch;
      EXPECT_NO_THROW(train_images(sets, options)) << method << " of " << batch;  // it throws where the loss is not finite
    }
  }
}

TEST_F(ImageTrain, MemoryIsWhatIsListed) {
  std::map<std::string, ImageRunResult> runs;
  for (const char* method : {"fp32", "actnn", "division", "satchel"}) {
    ImageTrainOptions options = small(method, 1);
    const ImageRunResult r = runs[method] = train_images(images(), options);
    // At the end of forward the gradients of the step before, which stood, are gone.
    EXPECT_GE(r.peak_bytes, r.saved_bytes + r.loss_bytes - r.parameter_bytes) << method;
    // What softmax keeps: 32 images × 4 classes of float32.
    EXPECT_GE(r.loss_bytes, 32 * 4 * 4) << method;
    if (r.method != "fp32") {
      EXPECT_EQ(r.saved_bytes, total_bytes(r.tensors)) << method << ": what was measured is what is listed";
    }
  }
  EXPECT_LT(runs["satchel"].saved_bytes, runs["actnn"].saved_bytes);
  EXPECT_LT(runs["actnn"].saved_bytes * 4, runs["fp32"].saved_bytes);
  EXPECT_LT(runs["division"].saved_bytes * 4, runs["fp32"].saved_bytes);
}

TEST_F(ImageTrain, AMeanIsKept) {
  std::map<std::string, ImageRunResult> runs;
  for (const char* method : {"satchel", "satchel,mean=2.5", "satchel,mean=3"}) {
    const ImageRunResult r = runs[method] = train_images(images(), small(method, 2));
    EXPECT_EQ(r.saved_bytes, total_bytes(r.tensors)) << method;
    EXPECT_TRUE(std::isfinite(r.loss)) << method;
  }
  EXPECT_LT(runs["satchel"].saved_bytes, runs["satchel,mean=2.5"].saved_bytes);
  EXPECT_LT(runs["satchel,mean=2.5"].saved_bytes, runs["satchel,mean=3"].saved_bytes);
  // A budget between both is kept too. It holds what a step keeps whose gradients are looked at.
  const int64_t budget = (runs["satchel,mean=2.5"].saved_bytes + runs["satchel,mean=3"].saved_bytes) / 2;
  const ImageRunResult r = train_images(images(), small("satchel,budget=" + std::to_string(budget), 1));
  EXPECT_LE(r.saved_bytes, budget);
  EXPECT_GT(r.saved_bytes, runs["satchel,mean=2.5"].saved_bytes);
}

TEST_F(ImageTrain, BitsGoWhereTheyGainAndNeverAboveTheMean) {
  ImageTrainOptions options = small("satchel,mean=2.5");
  const ImageShape shape = shape_of(options, 4, 3, 16, 16);
  const auto shares = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{32, 3});
  ImageStep step(make_model(options, shape, at::kCPU, shares), options, at::kCPU);
  const at::Tensor x = at::randn({32, 3, 16, 16}).contiguous(at::MemoryFormat::ChannelsLast), y = at::arange(32).remainder(4);
  std::vector<int64_t> numbers(32);
  for (int64_t i = 0; i < 32; ++i) numbers[static_cast<size_t>(i)] = i;
  for (uint64_t i = 0; i < 10; ++i) {
    StepCost cost;
    shares->set_samples(numbers);
    step(x, y, {0.05, 0.9}, i, &cost);
    shares->step();
    int64_t bits = 0, values = 0;
    for (const SavedTensor& s : cost.tensors) {
      if (s.kind == "shared") bits += s.bits * s.shape[0] * s.shape[1], values += s.shape[0] * s.shape[1];
      if (s.kind == "extra bit") bits += s.shape[0] * s.shape[1];
    }
    EXPECT_LE(2 * bits, 5 * values) << i;
    EXPECT_GE(10 * bits, 21 * values) << i;  // few maps of this small model have samples that blocks do not fill
  }
  EXPECT_LE(shares->mean_bits(), 2.5);
  double least = 3, most = 2;
  for (const LayerBits& l : shares->layers()) least = std::min(least, l.mean_bits), most = std::max(most, l.mean_bits);
  EXPECT_LT(least, most) << "layers differ";
}

TEST_F(ImageTrain, EqualOptionsGiveEqualRuns) {
  const ImageRunResult one = train_images(images(), small("satchel"));
  ImageTrainOptions options = small("satchel");
  options.loaders = 3;
  const ImageRunResult two = train_images(images(), options);
  EXPECT_EQ(one.loss, two.loss) << "however many threads prepare batches";
  EXPECT_EQ(one.test, two.test);
  options.seed = 4;
  EXPECT_NE(train_images(images(), options).loss, one.loss);
}

TEST_F(ImageTrain, ResumedIsOneRun) {
  // From the third step on bits are shared out: six steps an epoch stop in the midst of it.
  for (const char* method : {"fp32", "satchel", "actnn", "satchel,mean=2.5"}) {
    ImageTrainOptions options = small(method, 3);
    options.checkpoint = file_;
    const ImageRunResult whole = train_images(images(), options);
    const TensorFile expected = read_safetensors(file_);
    const ImageRunResult part = train_images(images(), options, [](const ImageProgress& p) { return p.epoch < 1; });
    EXPECT_TRUE(part.interrupted);
    EXPECT_EQ(part.epochs, 1);
    options.resume = true;
    const ImageRunResult rest = train_images(images(), options);
    EXPECT_EQ(rest.epochs, 3);
    EXPECT_EQ(rest.loss, whole.loss) << method;
    EXPECT_EQ(rest.test, whole.test);
    EXPECT_EQ(rest.best_epoch, whole.best_epoch);
    EXPECT_TRUE(read_safetensors(file_).tensors == expected.tensors) << method << ": weights, statistics, momentum";

    options.lr = 0.5;
    expect_refused([&] { train_images(images(), options); }, "[resume] lr must be the checkpoint's, 0.05, got 0.5");
    options.lr = 0.05;
    options.epochs = 4;
    expect_refused([&] { train_images(images(), options); }, "[resume] epochs must be the checkpoint's, 3, got 4");
  }
}

/// As if it were killed: the report, which comes between an epoch's last step and its checkpoint, ends the run. What is left stands five
/// steps into the second epoch of six.
TEST_F(ImageTrain, GoesOnWithinAnEpoch) {
  for (const char* method : {"fp32", "satchel", "actnn", "satchel,mean=2.5"}) {
    ImageTrainOptions options = small(method, 3);
    options.eval_every = 2;
    options.checkpoint = file_;
    options.amp = std::string(method) == "satchel" ? Autocast::fp16 : Autocast::none;  // with a loss scale, which is state too
    const RunResult whole = train_images(images(), options);
    const TensorFile expected = read_safetensors(file_);
    std::remove(file_.c_str());
    options.resume = true;
    options.checkpoint_every = train_test::kAlways;
    const auto dies = [](const Progress& p) {
      if (p.epoch == 2) throw std::runtime_error("killed");
      return true;
    };
    EXPECT_THROW(train_images(images(), options, dies), std::runtime_error);
    const RunState state = read_checkpoint(file_, kImageFormat).state;
    EXPECT_EQ(state.epoch, 1);
    EXPECT_EQ(state.step, 5);
    const RunResult rest = train_images(images(), options);
    EXPECT_EQ(rest.loss, whole.loss) << method;
    EXPECT_EQ(rest.test, whole.test);
    EXPECT_EQ(rest.best_test, whole.best_test);
    ASSERT_EQ(rest.curve.size(), 3u);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(rest.curve[i].loss, whole.curve[i].loss) << method << i;
    EXPECT_TRUE(read_safetensors(file_).tensors == expected.tensors) << method;
    std::remove(file_.c_str());
  }
}

TEST_F(ImageTrain, AutocastTrains) {
  for (const char* method : {"fp32", "actnn", "division", "satchel"}) {
    ImageTrainOptions options = small(method, 1);
    options.amp = Autocast::bf16;
    const ImageRunResult r = train_images(images(), options);
    EXPECT_TRUE(std::isfinite(r.loss)) << method;
    EXPECT_LT(r.loss, 2) << method << ": near or below log 4 = 1.39";
  }
}

TEST_F(ImageTrain, LossScaleSkipsAndRecovers) {
  ImageTrainOptions options = small("satchel", 1);
  options.amp = Autocast::fp16;
  options.loss_scale.initial = 0x1p30;  // gradients of the logits overflow float16 until it has come down
  const ImageRunResult r = train_images(images(), options);
  EXPECT_GT(r.skipped_steps, 0);
  EXPECT_TRUE(std::isfinite(r.loss));
}

TEST_F(ImageTrain, NaNStopsTheRun) {
  ImageTrainOptions options = small("satchel", 3);
  options.lr = 1e30;
  options.checkpoint = file_;
  expect_refused([&] { train_images(images(), options); },
                 "[train] loss must be finite (satchel; a smaller lr or a warm-up may help), got nan at epoch 1, step ");
  EXPECT_NE(::access(file_.c_str(), F_OK), 0) << "a run that diverged leaves no checkpoint";
  options = small("fp32", 1);
  options.lr = 1e30;
  options.batch = images().train.count();  // one step, whose loss is still that of the first weights
  options.checkpoint = file_;
  expect_refused([&] { train_images(images(), options); },
                 "[train] logits must be finite (fp32; a smaller lr or a warm-up may help), got nan or infinity after epoch 1, the last");
  options.epochs = 2;
  options.checkpoint_every = train_test::kAlways;
  expect_refused([&] { train_images(images(), options); }, "got nan or infinity after epoch 1");
  EXPECT_NE(::access(file_.c_str(), F_OK), 0) << "nor does one that did in an epoch's last step";
}

TEST_F(ImageTrain, NamesWhatDoesNotFit) {
  const auto refused = [](const std::function<void(ImageTrainOptions&)>& change, const std::string& part) {
    ImageTrainOptions o = small("fp32");
    change(o);
    expect_refused([&] { train_images(images(), o); }, part);
  };
  using O = ImageTrainOptions;
  refused([](O& o) { o.batch = 193; }, "batch must be at most the 192 images there are, got 193");
  refused([](O& o) { o.batch = 0; }, "[train] batch must be 1 to 1048576, got 0");
  refused([](O& o) { o.epochs = 0; }, "[train] epochs must be at least 1, got 0");
  refused([](O& o) { o.lr = kInfinity; }, "[train] lr must be finite and above 0, got inf");
  refused([](O& o) { o.momentum = 0; }, "[train] nesterov needs momentum, got 0");
  refused([](O& o) { o.label_smoothing = 1; }, "[train] label smoothing must be at least 0 and below 1, got 1");
  refused([](O& o) { o.warmup = 3; }, "[train] warm-up must be at most 2 epochs, got 3");
  refused([](O& o) { o.milestones = {1}; }, "[train] milestones need schedule step, got cosine");
  refused([](O& o) { o.model = "resnet19"; }, "got 'resnet19'");
  refused([](O& o) { o.model = "vgg16"; }, "[train] images must be at least 32 × 32 for vgg16, got 16 × 16");
  refused(
      [](O& o) {
        o.model = "vgg16";
        o.method = parse_method("satchel,budget=1GB");  // which asks the plan, that would refuse in its own name
      },
      "[train] images must be at least 32 × 32 for vgg16, got 16 × 16");
  refused([](O& o) { o.tf32 = true; }, "[train] tf32 needs device cuda, got cpu");
  refused([](O& o) { o.loss_scale.backoff = 2; }, "[train] backoff of the loss scale must be above 0 and below 1, got 2");
  refused([](O& o) { o.resume = true; }, "[train] resume and checkpoint_every need a checkpoint, got none");
  ImageSets none = images();
  none.train.labels.clear();
  none.train.pixels.clear();
  expect_refused([&] { train_images(none, small("fp32")); }, "[train] data must have images to train on, got 0");
}

TEST_F(ImageTrain, WithoutTestImagesThereIsNoAccuracy) {
  ImageSets data = images();
  data.test = {};
  const ImageRunResult r = train_images(data, small("fp32", 1));
  EXPECT_TRUE(std::isnan(r.test));
  EXPECT_GT(r.loss, 0);
}

TEST(ImageStepTest, IsTorchsSgd) {
  at::set_num_threads(1);
  ImageTrainOptions options = small("fp32");
  const ImageShape shape = shape_of(options, 4, 3, 16, 16);
  ImageModel own = make_model(options, shape, at::kCPU), reference = make_model(options, shape, at::kCPU);
  ImageStep step(own, options, at::kCPU);
  torch::optim::SGD sgd(reference->parameters(),
                        torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(options.weight_decay));
  at::manual_seed(1);
  const at::Tensor x = at::randn({8, 3, 16, 16}).contiguous(at::MemoryFormat::ChannelsLast), y = at::arange(8).remainder(4);
  for (int i = 0; i < 3; ++i) {
    const at::Tensor loss = step(x, y, {0.05, 0.9}, 7);
    sgd.zero_grad();
    const at::Tensor expected = at::cross_entropy_loss(reference->forward(x), y);
    expected.backward();
    sgd.step();
    EXPECT_NEAR(loss.item<float>(), expected.item<float>(), 1e-4 * expected.item<float>()) << i;
  }
  const auto other = reference->named_parameters();
  for (const auto& item : own->named_parameters()) {
    // Three steps of the same arithmetic; fused kernels contract a product and a sum: a few roundings of 2^−24 of the values at hand,
    // which the network's gradients spread by less than a hundred.
    const double most = 300 * 0x1p-24 * (1 + other[item.key()].abs().max().item<double>());
    EXPECT_LE((item.value() - other[item.key()]).abs().max().item<double>(), most) << item.key();
  }
}

TEST(LossScalerTest, ScalesSkipsAndGrows) {
  LossScale options;
  options.initial = 1024;
  options.interval = 2;
  LossScaler scaler(options, at::kCPU);
  EXPECT_EQ(scaler.scaled(at::full({}, 3.0)).item<float>(), 3072);
  const auto step = [&](double gradient) {
    const at::Tensor g = at::full({5}, gradient), other = at::full({2}, 2048.0);
    scaler.unscale_({g, other});
    const bool found = scaler.found().item<float>() > 0;
    scaler.update();
    return std::pair{g[0].item<float>(), found};
  };
  EXPECT_EQ(step(2048), (std::pair{2.0f, false}));
  EXPECT_EQ(scaler.scale(), 1024);
  EXPECT_EQ(step(1024), (std::pair{1.0f, false}));
  EXPECT_EQ(scaler.scale(), 2048) << "two steps without an infinity";
  EXPECT_TRUE(step(kInfinity).second);
  EXPECT_EQ(scaler.scale(), 1024);
  EXPECT_TRUE(step(std::numeric_limits<double>::quiet_NaN()).second);
  EXPECT_EQ(scaler.scale(), 512);
  EXPECT_EQ(scaler.skipped(), 2);
  EXPECT_EQ(step(512), (std::pair{1.0f, false})) << "what was seen is forgotten";

  LossScaler other({}, at::kCPU);
  other.restore(scaler.state());
  EXPECT_EQ(other.scale(), 512);
  EXPECT_EQ(other.skipped(), 2);
  expect_refused([&] { other.restore({}); }, "[resume] checkpoint must hold the loss scale's");
}

TEST(ImageOptionsTest, SchedulesCountInEpochs) {
  ImageTrainOptions o = small("fp32", 9);
  o.schedule = Decay::step;
  EXPECT_EQ(schedule_of(o, 10).milestones, (std::vector<int64_t>{30, 60})) << "each third";
  o.milestones = {1, 4.5};
  o.warmup = 0.5;
  const Schedule s = schedule_of(o, 10);
  EXPECT_EQ(s.milestones, (std::vector<int64_t>{10, 45}));
  EXPECT_EQ(s.warmup, 5);
  EXPECT_EQ(s.steps, 90);
  EXPECT_TRUE(shape_of(o, 10, 3, 64, 64).small_stem);
  EXPECT_FALSE(shape_of(o, 10, 3, 65, 64).small_stem);
  o.small_stem = false;
  EXPECT_FALSE(shape_of(o, 10, 3, 32, 32).small_stem);
}

}  // namespace
}  // namespace satchel
