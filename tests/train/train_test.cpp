// Training end to end on small graphs: it learns, measures what it says, and refuses what it should.
#include "satchel/train/train.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>

#include "satchel/core/error.h"
#include "satchel/core/graph_layer.h"
#include "tests/train/train_common.h"

namespace satchel {
namespace {

using namespace train_test;

TEST_F(Train, LearnsWithEveryMethodAndModel) {
  const GraphData data = communities();
  for (const std::string& conv : graph_layer_names()) {
    for (const char* method : {"fp32", "exact", "blockwise", "projection", "satchel"}) {
      TrainOptions o = small(method, 40);
      o.shape.conv = conv;
      const RunResult r = train_graph(data, o);
      // Chance is 25 %: far above it, a model has learnt.
      EXPECT_GT(r.test, 70.0) << method;
      EXPECT_EQ(r.method, method);
      EXPECT_EQ(r.epochs, 40);
      EXPECT_GT(r.step_seconds, 0.0);
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

TEST_F(Train, TheLastLayerMayGiveTrainingNodesAlone) {
  for (const Task task : {Task::single_label, Task::multi_label, Task::binary}) {
    const GraphData data = communities(task);
    for (const char* model : {"sage", "gcn", "gin"}) {
      TrainOptions o = small("satchel,bits=32", 3);
      o.shape.conv = model;
      o.shape.dropout = 0;
      o.last_layer = LastLayer::training;
      const RunResult some = train_graph(data, o);
      o.last_layer = LastLayer::all;
      const RunResult all = train_graph(data, o);
      EXPECT_EQ(all.last_layer_bytes, 0);
      EXPECT_EQ(some.last_layer_bytes > 0, std::string(model) != "gin") << "gin keeps more than its input";
      EXPECT_EQ(some.saved_bytes, all.saved_bytes) << model;
      if (some.last_layer_bytes > 0) {
        EXPECT_LT(some.loss_bytes, all.loss_bytes) << model;
      }
      // Equal but for the order of sums over 400 nodes, three steps apart.
      ASSERT_EQ(some.curve.size(), 3U);
      for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(some.curve[i].loss, all.curve[i].loss, 1e-4 * all.curve[i].loss) << model << ' ' << i;
    }
  }
}

TEST_F(Train, TheLastLayerGivesAllNodesWhereMoreThanItsInputIsKept) {
  const auto edge_bytes = [&](TrainOptions o) {
    o.last_layer = LastLayer::training;
    return train_graph(communities(), o).last_layer_bytes;
  };
  EXPECT_GT(edge_bytes(small("satchel", 2)), 0);
  EXPECT_EQ(edge_bytes(small("exact", 2)), 0) << "A·x is kept of every node, as published";
  EXPECT_EQ(edge_bytes(small("fp32", 2)), 0) << "torch's own functions";
  TrainOptions one = small("satchel", 2);
  one.shape.layers = 1;
  EXPECT_EQ(edge_bytes(one), 0) << "a single layer reads the data set";
  EXPECT_EQ(train_graph(communities(), small("satchel", 2)).last_layer_bytes, 0) << "only where it is asked for";
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
  o.checkpoint_every = kAlways;
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
  refuse([](TrainOptions& o) { o.device = "tpu"; }, "[train] device must be cpu, cuda or cuda:N, got 'tpu'");
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
