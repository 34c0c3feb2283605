// Training end to end on small graphs: it learns, resumes bit for bit, measures what it says, and refuses what it should.
#include "satchel/train/train.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>

#include "satchel/core/error.h"
#include "satchel/core/noise.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/graph_task.h"
#include "satchel/train/names.h"

namespace satchel {
namespace {

constexpr int64_t kNodes = 400, kFeatures = 16, kClasses = 4;

double uniform(uint64_t element) { return noise(77, Stream::seeds, element) * 0x1p-16; }

/// Communities: a node's class is node mod classes, four of five edges stay inside, features are noise and a bump at the class.
GraphData communities(Task task = Task::single_label) {
  GraphData data;
  data.name = "communities";
  data.nodes = kNodes;
  data.task = task;
  data.classes = task == Task::binary ? 1 : kClasses;
  data.features.rows = kNodes;
  data.features.columns = kFeatures;
  data.start.push_back(0);
  uint64_t draw = 0;
  for (int64_t node = 0; node < kNodes; ++node) {
    for (int edge = 0; edge < 4; ++edge) {
      const int64_t other = static_cast<int64_t>(uniform(draw++) * kNodes);
      const bool inside = uniform(draw++) < 0.8;
      data.target.push_back(static_cast<int32_t>(inside ? other - other % kClasses + node % kClasses : other));
    }
    data.start.push_back(static_cast<int64_t>(data.target.size()));
    for (int64_t f = 0; f < kFeatures; ++f) {
      data.features.dense.push_back(static_cast<float>(2 * uniform(draw++) - 1 + (f == node % kClasses ? 0.7 : 0.0)));
    }
    data.labels.push_back(static_cast<int32_t>(task == Task::binary ? node % 2 : node % kClasses));
    for (int64_t c = 0; c < kClasses; ++c) data.targets.push_back(c == node % kClasses || (c + 1) % kClasses == node % kClasses);
  }
  if (task == Task::multi_label)
    data.labels.clear();
  else
    data.targets.clear();
  Split split;
  for (int64_t node = 0; node < kNodes; ++node) (node % 5 == 0 ? split.valid : node % 5 == 1 ? split.test : split.train).push_back(node);
  data.splits = {split};
  return data;
}

TrainOptions small(const std::string& method, int64_t epochs) {
  TrainOptions o;
  o.shape.hidden = 32;
  o.method = parse_method(method);
  o.epochs = epochs;
  o.seed = 3;
  return o;
}

class Train : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { std::remove(file_.c_str()); }
  std::string file_ = testing::TempDir() + "satchel_train_" + std::to_string(getpid()) + ".safetensors";
};

void expect_refused(const std::function<void()>& run, const std::string& part) {
  try {
    run();
    ADD_FAILURE() << "nothing was thrown, but " << part;
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

void expect_equal(const TensorMap& a, const TensorMap& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (const auto& [name, tensor] : a) {
    ASSERT_TRUE(b.contains(name)) << what << name;
    EXPECT_TRUE(tensor.equal(b.at(name))) << what << name;
  }
}

TEST_F(Train, LearnsWithEveryMethodAndModel) {
  const GraphData data = communities();
  for (const Conv conv : {Conv::sage, Conv::gcn}) {
    for (const char* method : {"fp32", "exact", "blockwise", "projection", "satchel"}) {
      TrainOptions o = small(method, 40);
      o.shape.conv = conv;
      const RunResult r = train_graph(data, o);
      // Chance is 25 %: far above it, a model has learnt.
      EXPECT_GT(r.test, 70.0) << method;
      EXPECT_EQ(r.method, method);
      EXPECT_EQ(r.epochs, 40);
      EXPECT_GT(r.epoch_seconds, 0.0);
    }
  }
}

TEST_F(Train, LearnsEveryTask) {
  for (const Task task : {Task::multi_label, Task::binary}) {
    for (const char* method : {"fp32", "satchel"}) {
      // Always "yes" has a micro-F1 of 66.7 % (half of the labels are set), chance a ROC AUC of 50 %.
      EXPECT_GT(train_graph(communities(task), small(method, 60)).test, 75.0) << method << static_cast<int>(task);
    }
  }
}

TEST_F(Train, EqualOptionsGiveEqualRuns) {
  const GraphData data = communities();
  const RunResult a = train_graph(data, small("satchel", 5)), b = train_graph(data, small("satchel", 5));
  EXPECT_EQ(a.loss, b.loss);
  EXPECT_EQ(a.test, b.test);
  TrainOptions other = small("satchel", 5);
  other.seed = 4;
  EXPECT_NE(a.loss, train_graph(data, other).loss);
}

/// Every method starts from the same weights, and the first forward is exact: the first loss differs by rounding and dropout only.
TEST_F(Train, MethodsArePaired) {
  const GraphData data = communities();
  const auto first_loss = [&](const char* method) {
    TrainOptions o = small(method, 1);
    o.shape.dropout = 0;
    return train_graph(data, o).loss;
  };
  const double fp32 = first_loss("fp32");
  // Float32 sums over at most kNodes terms in three layers: 3·400·2^−24 of a loss around 1.
  for (const char* method : {"exact", "blockwise", "satchel"}) EXPECT_NEAR(first_loss(method), fp32, 3 * 400 * 0x1p-24 * 2) << method;
}

TEST_F(Train, ResumesBitForBit) {
  const GraphData data = communities();
  for (const Optimizer optimizer : {Optimizer::adam, Optimizer::adamw, Optimizer::sgd}) {
    for (const int64_t eval_every : {1, 2}) {
      TrainOptions o = small("satchel", 6);
      o.checkpoint = file_;
      o.optimizer = optimizer;
      o.eval_every = eval_every;
      o.clip = 0.5;
      const RunResult whole = train_graph(data, o);
      const Checkpoint expected = read_checkpoint(file_);
      o.epochs = 3;
      train_graph(data, o);
      o.epochs = 6;
      o.resume = true;
      const RunResult resumed = train_graph(data, o);
      const Checkpoint got = read_checkpoint(file_);
      expect_equal(expected.model, got.model, "model.");
      expect_equal(expected.best, got.best, "best.");
      expect_equal(expected.optimizer, got.optimizer, "optimizer.");
      EXPECT_EQ(whole.loss, resumed.loss);
      EXPECT_EQ(whole.test, resumed.test);
      EXPECT_EQ(whole.valid, resumed.valid);
      EXPECT_EQ(whole.best_epoch, resumed.best_epoch);
      EXPECT_EQ(resumed.epochs, 6);
    }
  }
}

TEST_F(Train, StopsWhenAskedAndGoesOn) {
  const GraphData data = communities();
  TrainOptions o = small("satchel", 6);
  o.checkpoint = file_;
  const RunResult whole = train_graph(data, o);
  const RunResult part = train_graph(data, o, [](const Progress& p) { return p.epoch < 2; });
  EXPECT_TRUE(part.interrupted);
  EXPECT_EQ(part.epochs, 2);
  o.resume = true;
  const RunResult rest = train_graph(data, o);
  EXPECT_FALSE(rest.interrupted);
  EXPECT_EQ(rest.loss, whole.loss);
  EXPECT_EQ(rest.test, whole.test);
}

TEST_F(Train, StopsEarly) {
  TrainOptions o = small("satchel", 200);
  o.patience = 5;
  const RunResult r = train_graph(communities(), o);
  EXPECT_LT(r.epochs, 200);
  EXPECT_EQ(r.epochs, r.best_epoch + 5);
}

TEST_F(Train, MeasuresWhatThePlanPredicts) {
  const GraphData data = communities();
  std::map<std::string, RunResult> runs;
  for (const char* method : {"fp32", "exact", "blockwise", "satchel"}) {
    TrainOptions o = small(method, 4);
    const RunResult r = train_graph(data, o);
    runs[method] = r;
    GraphShape shape = o.shape;
    shape.features = kFeatures;
    shape.classes = kClasses;
    const std::vector<SavedTensor> plan = plan_graph(shape, kNodes, o.method);
    if (r.method != "fp32") {  // whose lines are the plan's own, and whose loss keeps training rows only
      EXPECT_EQ(r.tensors, plan) << method;
      EXPECT_GE(r.loss_bytes, kNodes * kClasses * 4) << method;
    }
    // The allocator gives out multiples of 64 bytes at most; nothing else may be kept.
    EXPECT_GE(r.saved_bytes, total_bytes(plan)) << method;
    EXPECT_LE(r.saved_bytes, total_bytes(plan) + 64 * static_cast<int64_t>(plan.size())) << method;
    EXPECT_GT(r.peak_bytes, r.saved_bytes) << method;
  }
  EXPECT_LT(runs["satchel"].saved_bytes, runs["blockwise"].saved_bytes);
  EXPECT_LT(runs["blockwise"].saved_bytes, runs["exact"].saved_bytes);
  EXPECT_LT(runs["exact"].saved_bytes * 5, runs["fp32"].saved_bytes);
  EXPECT_EQ(runs["fp32"].cached_bytes, 0);
  EXPECT_EQ(runs["satchel"].cached_bytes, kNodes * kFeatures * 4);
}

TEST_F(Train, PredictsFromTheBestWeights) {
  for (const Task task : {Task::single_label, Task::multi_label, Task::binary}) {
    const GraphData data = communities(task);
    for (const int64_t eval_every : {1, 4}) {
      TrainOptions o = small("satchel", 10);
      o.checkpoint = file_;
      o.eval_every = eval_every;
      const RunResult r = train_graph(data, o);
      const Prediction p = predict_graph(data, file_);
      EXPECT_EQ(p.test, r.test);
      EXPECT_EQ(p.nodes, kNodes);
      ASSERT_EQ(p.scores.size(), static_cast<size_t>(kNodes * p.outputs));
      ASSERT_EQ(p.classes.size(), static_cast<size_t>(task == Task::multi_label ? kNodes * kClasses : kNodes));
      for (const int64_t c : p.classes) ASSERT_TRUE(c >= 0 && c < (task == Task::single_label ? kClasses : 2));
    }
  }
}

TEST_F(Train, RefusesAnotherRunsCheckpoint) {
  const GraphData data = communities();
  TrainOptions o = small("satchel", 2);
  o.checkpoint = file_;
  train_graph(data, o);
  o.resume = true;
  o.epochs = 4;
  TrainOptions other = o;
  other.lr = 0.5;
  expect_refused([&] { train_graph(data, other); }, "[resume] lr must be the checkpoint's, 0.01, got 0.5");
  other = o;
  other.method = parse_method("exact");
  expect_refused([&] { train_graph(data, other); }, "[resume] method must be the checkpoint's, \"satchel\", got \"exact\"");
  other = o;
  other.epochs = 1;
  expect_refused([&] { train_graph(data, other); }, "[resume] epochs must be at least the 2 done, got 1");
  GraphData changed = data;
  changed.features.dense[5] += 1;
  expect_refused([&] { train_graph(changed, o); }, "[resume] the data's digest must be the checkpoint's");
  changed = data;
  changed.features.columns = 1;
  changed.features.dense.resize(kNodes);
  expect_refused([&] { predict_graph(changed, file_); }, "[predict] data must have the 16 features of the checkpoint, got 1");
  std::remove(file_.c_str());
  EXPECT_THROW(train_graph(data, o), Error);
  EXPECT_THROW(predict_graph(data, file_), Error);
}

TEST_F(Train, CheckpointsTellTypesAndNotCudaGraphs) {
  TrainOptions o = small("satchel", 2);
  o.device = "cuda";
  o.tf32 = true;
  o.amp = Amp::bf16;
  const TrainOptions again = parse_options(describe_options(o));
  EXPECT_TRUE(again.tf32);
  EXPECT_EQ(again.amp, Amp::bf16);
  TrainOptions other = o;
  other.cuda_graph = true;
  EXPECT_EQ(describe_options(other), describe_options(o));
  other.tf32 = false;
  expect_refused([&] { check_equal(describe_options(o), describe_options(other), "options"); },
                 "[resume] tf32 must be the checkpoint's, true, got false");
  other = o;
  other.amp = Amp::none;
  expect_refused([&] { check_equal(describe_options(o), describe_options(other), "options"); },
                 "[resume] amp must be the checkpoint's, \"bf16\", got \"none\"");

  // A checkpoint from before there was a choice.
  other = small("satchel", 2);
  other.amp = Amp::none;
  std::string old = describe_options(other);
  const std::string added = R"(,"tf32":false,"amp":"none")";
  ASSERT_NE(old.find(added), std::string::npos) << old;
  old.erase(old.find(added), added.size());
  EXPECT_FALSE(parse_options(old).tf32);
  EXPECT_EQ(parse_options(old).amp, Amp::none);
  expect_refused([] { from_name<Amp>("half", "train"); }, "[train] amp must be auto, none, bf16, fp16, got 'half'");
}

TEST_F(Train, AutomaticTakesFloat16WhereTf32RoundsAsMuch) {
  TrainOptions o = small("satchel", 2);
  o.device = "cuda";
  o.tf32 = true;
  const FeatureRange usual{true, 3};
  EXPECT_EQ(o.amp, Amp::automatic);
  EXPECT_EQ(amp_for(o, usual), Amp::fp16);
  for (const auto& [largest, expected] : {std::pair{0x1p-8f, Amp::fp16},
                                          {0x1p8f, Amp::fp16},
                                          {0x1.fffp-9f, Amp::none},
                                          {0x1.002p8f, Amp::none},
                                          {0.0f, Amp::none},
                                          {std::numeric_limits<float>::infinity(), Amp::none},
                                          {std::numeric_limits<float>::quiet_NaN(), Amp::none}})
    EXPECT_EQ(amp_for(o, {true, largest}), expected) << largest;
  EXPECT_EQ(amp_for(o, FeatureRange{}), Amp::none) << "sparse";
  const auto changed = [&](const std::function<void(TrainOptions&)>& change) {
    TrainOptions other = o;
    change(other);
    return amp_for(other, usual);
  };
  for (const char* method : {"exact", "blockwise", "gact", "satchel,bits=3"})
    EXPECT_EQ(changed([&](TrainOptions& c) { c.method = parse_method(method); }), Amp::fp16) << method;
  for (const char* method : {"fp32", "satchel,bits=32", "projection"})
    EXPECT_EQ(changed([&](TrainOptions& c) { c.method = parse_method(method); }), Amp::none) << method;
  EXPECT_EQ(changed([](TrainOptions& c) { c.tf32 = false; }), Amp::none);
  EXPECT_EQ(changed([](TrainOptions& c) { c.device = "cpu"; }), Amp::none);
  EXPECT_EQ(changed([](TrainOptions& c) { c.shape.norm = Norm::none; }), Amp::none);
  EXPECT_EQ(changed([](TrainOptions& c) { c.shape.norm = Norm::layer; }), Amp::fp16);
  for (const Amp amp : {Amp::none, Amp::bf16, Amp::fp16}) EXPECT_EQ(changed([&](TrainOptions& c) { c.amp = amp; }), amp);

  GraphData data = communities();
  data.features.dense[7] = -123.5f;
  EXPECT_EQ(range_of(data.features).largest, 123.5f);
  data.features.dense[9] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(range_of(data.features).largest));
}

TEST_F(Train, TheScaleOfGradientsFollowsTheLossAndTheMethod) {
  const GraphData data = communities();
  TrainOptions o = small("satchel", 2);
  o.shape = shape_for(data, o.shape);
  o.amp = Amp::fp16;
  GraphTask task = make_task(data, o);
  EXPECT_EQ(task.input.x.scalar_type(), at::kHalf);
  const auto rows = static_cast<double>(task.train.numel());
  const double scale = gradient_scale(task, o);
  EXPECT_LE(scale, rows);
  EXPECT_GT(2 * scale, rows);
  task.train = at::arange(100000);
  EXPECT_EQ(gradient_scale(task, o), 65536);
  task.kind = Task::multi_label;
  task.labels = at::zeros({100000, 3});
  EXPECT_EQ(gradient_scale(task, o), 262144);
  o.method = parse_method("fp32");
  EXPECT_EQ(gradient_scale(task, o), 4096) << "torch's own weight gradients are float16 too";
  o.amp = Amp::bf16;
  EXPECT_EQ(gradient_scale(task, o), 1);
}

TEST_F(Train, Float16EndsWhereItsRangeEnds) {
  GraphData data = communities();
  TrainOptions o = small("satchel", 3);
  o.amp = Amp::fp16;
  GraphData large = data;
  large.features.dense[5] = 1e5f;
  expect_refused([&] { train_graph(large, o); }, "[train] features in float16 (--amp fp16) must be at most 65504 in size, got 100000");
  for (float& x : data.features.dense) x = 6e4f;  // 16 of them, times weights up to 1/4 and means: above 65504 in some channel
  expect_refused([&] { train_graph(data, o); }, "[train] loss and gradients must be finite (satchel; float16's range is small: --amp none");
}

/// A run that was begun in a type goes on in it, whatever `automatic` would take now.
TEST_F(Train, AutomaticResumesInTheCheckpointsType) {
  const GraphData data = communities();
  TrainOptions o = small("satchel", 6);
  o.amp = Amp::fp16;
  const double whole = train_graph(data, o).loss;
  o.checkpoint = file_;
  o.epochs = 3;
  train_graph(data, o);
  o.epochs = 6;
  o.resume = true;
  o.amp = Amp::automatic;
  const RunResult r = train_graph(data, o);
  EXPECT_EQ(r.amp, Amp::fp16);
  EXPECT_EQ(r.loss, whole);
  o.amp = Amp::none;
  expect_refused([&] { train_graph(data, o); }, "[resume] amp must be the checkpoint's, \"fp16\", got \"none\"");
}

TEST_F(Train, LearnsInHalves) {
  const GraphData data = communities();
  for (const auto& [conv, amp] :
       {std::pair{Conv::sage, Amp::bf16}, {Conv::gcn, Amp::bf16}, {Conv::sage, Amp::fp16}, {Conv::gcn, Amp::fp16}}) {
    for (const char* method : {"fp32", "exact", "blockwise", "satchel"}) {
      TrainOptions o = small(method, 40);
      o.shape.conv = conv;
      o.amp = amp;
      const RunResult r = train_graph(data, o);
      EXPECT_EQ(r.amp, amp);
      // Chance is 25 %: far above it, a model has learnt.
      EXPECT_GT(r.test, 70.0) << method;
      // A·X is kept in 16 bits, where a method caches it.
      EXPECT_EQ(r.cached_bytes, std::string(method) == "satchel" ? kNodes * kFeatures * 2 : 0) << method;
    }
  }
  TrainOptions o = small("satchel", 4);
  o.amp = Amp::bf16;
  o.checkpoint = file_;
  const RunResult r = train_graph(data, o);
  EXPECT_EQ(predict_graph(data, file_).test, r.test);
}

TEST_F(Train, NeverTrainsOnWithALossThatIsNotFinite) {
  GraphData data = communities();
  data.features.dense[0] = std::numeric_limits<float>::quiet_NaN();
  expect_refused([&] { train_graph(data, small("satchel", 3)); },
                 "[train] loss must be finite (satchel; a smaller lr may help), got nan at epoch 1");
  TrainOptions o = small("fp32", 1);
  o.lr = 1e30;  // the one step's loss is that of the first weights; products of 1e30 are beyond float32
  o.checkpoint = file_;
  expect_refused([&] { train_graph(communities(), o); },
                 "[train] logits must be finite (fp32; a smaller lr may help), got nan or infinity after epoch 1, the last");
  o.epochs = 2;
  o.checkpoint_every = 1;
  expect_refused([&] { train_graph(communities(), o); }, "got nan or infinity after epoch 1");
  o.eval_every = 10;  // nothing but the weights themselves tells
  o.optimizer = Optimizer::sgd;
  o.lr = 1e300;
  expect_refused([&] { train_graph(communities(), o); }, "[checkpoint] weights must be finite (nothing goes to ");
  EXPECT_NE(::access(file_.c_str(), F_OK), 0) << "a run that diverged leaves no checkpoint";
}

TEST_F(Train, RefusesBadOptionsAndData) {
  const GraphData data = communities();
  const auto refuse = [&](const std::function<void(TrainOptions&)>& change, const std::string& part) {
    TrainOptions o = small("satchel", 2);
    change(o);
    expect_refused([&] { train_graph(data, o); }, part);
  };
  refuse([](TrainOptions& o) { o.lr = 0; }, "[train] lr must be finite and above 0, got 0");
  refuse([](TrainOptions& o) { o.lr = std::nan(""); }, "[train] lr must be");
  refuse([](TrainOptions& o) { o.shape.dropout = 1; }, "[train] dropout must be at least 0 and below 1, got 1");
  refuse([](TrainOptions& o) { o.shape.hidden = 0; }, "[train] hidden must be 1 to");
  refuse([](TrainOptions& o) { o.epochs = 0; }, "[train] epochs must be at least 1, got 0");
  refuse([](TrainOptions& o) { o.device = "tpu"; }, "[train] device must be cpu or cuda, got 'tpu'");
  refuse([](TrainOptions& o) { o.resume = true; }, "need a checkpoint");
  refuse([](TrainOptions& o) { o.tf32 = true; }, "[train] tf32 needs device cuda, got cpu");
  refuse([](TrainOptions& o) { o.cuda_graph = true; }, "[train] cuda_graph needs device cuda, got cpu");
  GraphData bad = data;
  bad.labels[static_cast<size_t>(bad.splits[0].train[0])] = kClasses;
  expect_refused([&] { train_graph(bad, small("satchel", 2)); }, "[data] label of training node");
  bad = data;
  bad.splits[0].valid = {kNodes};
  expect_refused([&] { train_graph(bad, small("satchel", 2)); }, "[data] validation nodes must be 0 to 399, got 400");
  bad = data;
  bad.target[3] = kNodes;
  EXPECT_THROW(train_graph(bad, small("satchel", 2)), Error);
}

}  // namespace
}  // namespace satchel
