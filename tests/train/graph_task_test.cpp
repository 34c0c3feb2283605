// From data sets to what training reads: weights of edges, nodes without a label, splits that a metric cannot score.
#include "satchel/train/graph_task.h"

#include <ATen/ops/eye.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/train/train_common.h"

namespace satchel {
namespace {

using namespace train_test;

/// 0 → 1 with weight 2, 1 → 0 with 4, 0 → 2 with 6; all three nodes are in the split.
GraphData triangle() {
  GraphData data;
  data.name = "triangle";
  data.nodes = 3;
  data.start = {0, 2, 3, 3};
  data.target = {1, 2, 0};
  data.weight = {2, 6, 4};
  data.features = {3, 1, {1, 2, 3}, {}, {}, {}};
  data.classes = 1;
  data.labels = {0, 0, 0};
  data.splits = {{{0}, {1}, {2}}};
  return data;
}

/// A as a dense matrix.
std::vector<float> dense(const GraphData& data, const std::string& conv) {
  TrainOptions options = small("fp32", 1);
  options.shape.conv = conv;
  options.amp = Amp::none;
  const at::Tensor a = multiply(make_task(data, options).a.matrix, at::eye(data.nodes)).contiguous();
  return {a.const_data_ptr<float>(), a.const_data_ptr<float>() + a.numel()};
}

TEST(GraphTask, WeightsOfEdgesAreInTheAdjacency) {
  // In both directions: 0 – 1 with (2 + 4)/2 = 3, 0 – 2 with 6. A row of the mean sums to 1.
  const std::vector<float> mean = {0, 3 / 9.0f, 6 / 9.0f, 1, 0, 0, 1, 0, 0};
  // gcn: one loop of weight 1 each, degrees 10, 4 and 7.
  const auto w = [](double value, double a, double b) { return static_cast<float>(value / std::sqrt(a * b)); };
  const std::vector<float> gcn = {w(1, 10, 10), w(3, 10, 4), w(6, 10, 7), w(3, 4, 10), w(1, 4, 4), 0, w(6, 7, 10), 0, w(1, 7, 7)};
  GraphData data = triangle();
  const std::vector<float> sage = dense(data, "sage"), own = dense(data, "gcn");
  for (size_t i = 0; i < 9; ++i) {  // a few roundings of float32, each 2^−24 of a value below 1
    EXPECT_NEAR(sage[i], mean[i], 4 * 0x1p-24) << i;
    EXPECT_NEAR(own[i], gcn[i], 4 * 0x1p-24) << i;
  }
  data.weight.clear();
  EXPECT_EQ(dense(data, "sage"), (std::vector<float>{0, 0.5f, 0.5f, 1, 0, 0, 1, 0, 0}));
  data.weight = {1, 2};
  expect_refused([&] { dense(data, "sage"); }, "[data] there must be a weight an edge, 3, got 2");
}

TEST(GraphTask, NodesWithoutALabelAreNeverTrainedOrScored) {
  GraphData data = communities();
  data.splits.clear();
  for (size_t node = 0; node < kNodes; node += 3) data.labels[node] = -1;
  TrainOptions options = small("satchel", 1);
  options.amp = Amp::none;
  const GraphTask task = make_task(data, options);
  int64_t nodes = 0;
  for (const at::Tensor* part : {&task.train, &task.valid, &task.test}) {
    EXPECT_EQ(part->remainder(3).eq(0).sum().item<int64_t>(), 0);
    nodes += part->numel();
  }
  EXPECT_EQ(nodes, kNodes - (kNodes + 2) / 3);
  // What they have for features and edges stays, and a run on the others goes well.
  EXPECT_EQ(task.input.x.size(0), kNodes);
  EXPECT_GT(train_graph(data, small("satchel", 20)).test, 60);  // chance is 25
  data.splits = communities().splits;
  data.source = "c.npz";
  expect_refused([&] { train_graph(data, small("satchel", 1)); }, "[data] label of training node 3 must be 0 to 3 in c.npz, got -1");
}

TEST(GraphTask, RocAucNamesFileAndPartOfTheSplit) {
  GraphData data = communities(Task::binary);
  data.source = "some/mine.npz";
  for (const auto& [part, name] : {std::pair{&Split::train, "training"}, {&Split::valid, "validation"}, {&Split::test, "test"}}) {
    for (const int64_t kept : {0, 1}) {
      GraphData one = data;
      std::erase_if(one.splits[0].*part, [&](int64_t node) { return one.labels[static_cast<size_t>(node)] != kept; });
      expect_refused([&] { train_graph(one, small("satchel", 1)); },
                     "[data] some/mine.npz: " + std::string(name) +
                         " nodes of the split must be of both classes, as ROC AUC needs, got class " + std::to_string(kept) + " only");
    }
  }
}

TEST(GraphTask, GraphsWithoutLabelsAreNotTrainedOn) {
  GraphData data = communities();
  data.source = "c.npz";
  data.labels.clear();
  data.classes = 0;
  data.splits.clear();
  expect_refused([&] { make_task(data, small("satchel", 1)); }, "[load] c.npz must have labelled nodes to draw a split from, got none");
  data.splits = communities().splits;
  expect_refused([&] { make_task(data, small("satchel", 1)); }, "[data] c.npz must have labels to train on, got none");
}

}  // namespace
}  // namespace satchel
