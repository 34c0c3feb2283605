// Runs that stop and go on, bit for bit, predictions from what they left, and checkpoints of other runs.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>

#include "satchel/core/error.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/names.h"
#include "satchel/train/train.h"
#include "tests/train/train_common.h"

namespace satchel {
namespace {

using namespace train_test;

void expect_equal(const TensorMap& a, const TensorMap& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (const auto& [name, tensor] : a) {
    ASSERT_TRUE(b.contains(name)) << what << name;
    EXPECT_TRUE(tensor.equal(b.at(name))) << what << name;
  }
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
      EXPECT_EQ(p.count, kNodes);
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
  EXPECT_THROW(predict_graph(data, file_), Error);
  EXPECT_EQ(train_graph(data, o).epochs, 4) << "nothing to go on from: it starts anew";
}

TEST_F(Train, AResultOutlivesItsCheckpoint) {
  const std::string folder = testing::TempDir() + "satchel_gone_" + std::to_string(getpid());
  ASSERT_EQ(::mkdir(folder.c_str(), 0700), 0);
  TrainOptions o = small("satchel", 4);
  const RunResult whole = train_graph(communities(), o);
  o.checkpoint = folder + "/run.st";
  o.checkpoint_every = kAlways;
  std::string error;
  try {
    train_graph(communities(), o, [&](const Progress& p) {
      if (p.epoch == 1) {
        EXPECT_EQ(::rmdir(folder.c_str()), 0);  // before the first checkpoint
      }
      if (p.epoch == 2) error = p.checkpoint_error;
      return true;
    });
    ADD_FAILURE() << "a checkpoint that is not there must be told of";
  } catch (const CheckpointNotWritten& e) {
    EXPECT_EQ(e.result.loss, whole.loss);
    EXPECT_EQ(e.result.test, whole.test);
    EXPECT_EQ(e.result.curve.size(), 4u);
    EXPECT_NE(std::string(e.what()).find("output must be writable"), std::string::npos) << e.what();
  }
  EXPECT_NE(error.find("output must be writable"), std::string::npos) << error;
}

TEST_F(Train, AMethodIsStoredAsItsText) {
  TrainOptions o = small("blockwise,levels=even,block=16rows", 2);
  EXPECT_EQ(describe_options(o).find("method."), std::string::npos);
  EXPECT_EQ(parse_options(describe_options(o)).method, o.method);
  o.checkpoint = file_;
  o.method.input.bits = 5;  // under a name that says 2
  expect_refused([&] { train_graph(communities(), o); }, "[train] with a checkpoint, which holds the method's text, a method must be as");
}

TEST_F(Train, ACurveHasEveryEpoch) {
  TrainOptions o = small("satchel", 5);
  o.eval_every = 2;
  o.checkpoint = file_;
  o.epochs = 3;
  train_graph(communities(), o);
  o.epochs = 5;
  o.resume = true;
  const RunResult r = train_graph(communities(), o);
  ASSERT_EQ(r.curve.size(), 5u);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(r.curve[i].epoch, static_cast<int64_t>(i) + 1);
    EXPECT_TRUE(std::isfinite(r.curve[i].loss));
    EXPECT_EQ(std::isnan(r.curve[i].valid), i == 0 || i == 2) << "evaluated after 2, 4 and the last";
  }
  EXPECT_EQ(r.curve.back().loss, r.loss);
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

}  // namespace
}  // namespace satchel
