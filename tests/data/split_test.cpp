#include <gtest/gtest.h>

#include <algorithm>

#include "satchel/core/error.h"
#include "satchel/data/graph_data.h"

namespace satchel {
namespace {

using I64 = std::vector<int64_t>;

/// Nodes of class c: counts[c], one class after the other.
GraphData of_classes(const std::vector<int>& counts) {
  GraphData data;
  for (size_t c = 0; c < counts.size(); ++c) data.labels.insert(data.labels.end(), static_cast<size_t>(counts[c]), static_cast<int32_t>(c));
  data.nodes = static_cast<int64_t>(data.labels.size());
  data.classes = static_cast<int64_t>(counts.size());
  return data;
}

I64 all_of(const Split& split) {
  I64 all = split.train;
  all.insert(all.end(), split.valid.begin(), split.valid.end());
  all.insert(all.end(), split.test.begin(), split.test.end());
  std::sort(all.begin(), all.end());
  return all;
}

bool same(const Split& a, const Split& b) { return a.train == b.train && a.valid == b.valid && a.test == b.test; }

TEST(Split, GivenOnesAreTakenInTurn) {
  GraphData data = of_classes({2, 2});
  data.splits = {{{0}, {1}, {2}}, {{3}, {}, {0}}};
  EXPECT_EQ(split_of(data, 7, 0).train, (I64{0}));
  EXPECT_EQ(split_of(data, 8, 1).train, (I64{3}));
  EXPECT_EQ(split_of(data, 9, 5).train, (I64{3}));
  EXPECT_THROW(split_of(data, 7, -1), Error);
}

TEST(Split, DrawnPerClass) {
  const GraphData data = of_classes({50, 10, 5, 1});
  const Split split = split_of(data, 3);
  I64 expected(66);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<int64_t>(i);
  EXPECT_EQ(all_of(split), expected);  // each node once
  for (const I64* part : {&split.train, &split.valid, &split.test}) EXPECT_TRUE(std::is_sorted(part->begin(), part->end()));
  const auto in = [&](const I64& part, int32_t c) {
    return std::count_if(part.begin(), part.end(), [&](int64_t node) { return data.labels[static_cast<size_t>(node)] == c; });
  };
  const int shares[4][3] = {{30, 10, 10}, {6, 2, 2}, {3, 1, 1}, {1, 0, 0}};  // 60/20/20, rounded
  for (int c = 0; c < 4; ++c) {
    EXPECT_EQ(in(split.train, c), shares[c][0]) << c;
    EXPECT_EQ(in(split.valid, c), shares[c][1]) << c;
    EXPECT_EQ(in(split.test, c), shares[c][2]) << c;
  }
}

TEST(Split, SeedDecides) {
  const GraphData data = of_classes({50, 50});
  EXPECT_TRUE(same(split_of(data, 3), split_of(data, 3)));
  EXPECT_FALSE(same(split_of(data, 3), split_of(data, 4)));
  // Two classes of one size are not shared out alike.
  const Split split = split_of(data, 3);
  I64 first, second;
  for (const int64_t node : split.train) (node < 50 ? first : second).push_back(node % 50);
  EXPECT_NE(first, second);
}

// A node is in the training part with a chance of 0.6: its count over 400 seeds has a standard deviation of √(400·0.24) = 9.8, and
// 50 nodes stay within 5 of them but for a chance of 3e-5.
TEST(Split, EveryNodeHasTheSameChance) {
  const GraphData data = of_classes({50});
  std::vector<int> count(50, 0);
  for (uint64_t seed = 0; seed < 400; ++seed) {
    for (const int64_t node : split_of(data, seed).train) ++count[static_cast<size_t>(node)];
  }
  for (const int c : count) EXPECT_NEAR(c, 240, 49);
}

TEST(Split, UnlabelledNodesAreLeftOut) {
  GraphData data = of_classes({10});
  data.labels[3] = -1;
  const I64 all = all_of(split_of(data, 1));
  EXPECT_EQ(all.size(), 9u);
  EXPECT_EQ(std::count(all.begin(), all.end(), 3), 0);
  std::fill(data.labels.begin(), data.labels.end(), -1);
  EXPECT_THROW(split_of(data, 1), Error);
}

TEST(Split, MultiLabelIsDrawnFromAllNodes) {
  GraphData data;
  data.nodes = 100;
  data.classes = 3;
  data.task = Task::multi_label;
  data.targets.assign(300, 0);
  const Split split = split_of(data, 5);
  EXPECT_EQ(split.train.size(), 60u);
  EXPECT_EQ(split.valid.size(), 20u);
  EXPECT_EQ(split.test.size(), 20u);
  EXPECT_EQ(all_of(split).size(), 100u);
}

}  // namespace
}  // namespace satchel
