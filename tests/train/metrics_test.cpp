#include "satchel/train/metrics.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "satchel/core/error.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::error_of;

at::Tensor floats(const std::vector<float>& values) { return at::tensor(values, at::kFloat); }
at::Tensor longs(const std::vector<int64_t>& values) { return at::tensor(values, at::kLong); }

TEST(Metrics, AccuracyCountsChosenNodes) {
  const at::Tensor logits = floats({1, 2, 3, 5, 4, 0, -3, -2, -1, 0, 9, 0}).view({4, 3});  // classes 2, 0, 2, 1
  const at::Tensor labels = longs({2, 1, 2, -1});                                          // node 3 has none
  EXPECT_EQ(accuracy(logits, labels, longs({0, 1, 2})), 200.0 / 3);
  EXPECT_EQ(accuracy(logits, labels, longs({0, 2})), 100);
  EXPECT_EQ(accuracy(logits, labels, longs({1})), 0);
  EXPECT_EQ(accuracy(logits.to(at::kDouble), labels.to(at::kInt), longs({0, 1}).to(at::kInt)), 50);
  EXPECT_EQ(accuracy(logits.t().contiguous().t(), labels, longs({0, 1})), 50);
}

TEST(Metrics, AccuracyOfNaNIsWrong) {
  const at::Tensor logits = floats({NAN, NAN, 1, NAN, 3, 2, INFINITY, 0}).view({4, 2});
  EXPECT_EQ(accuracy(logits, longs({0, 0, 0, 0}), at::arange(4)), 50);  // the last two
}

TEST(Metrics, NoGradientIsKept) {
  const at::Tensor logits = at::ones({3, 2}).set_requires_grad(true);
  const at::Tensor twice = logits.mul(2);
  EXPECT_EQ(accuracy(twice.add(floats({1, 0})), longs({0, 0, 1}), at::arange(3)), 200.0 / 3);
  EXPECT_EQ(micro_f1(twice, at::ones({3, 2}), at::arange(3)), 100);
  EXPECT_EQ(roc_auc(twice.select(1, 0), longs({0, 0, 1}), at::arange(3)), 50);
}

TEST(Metrics, MicroF1IsFromCountsOfAllLabels) {
  // Row 0: predicted a, c; true a, b. Row 1: predicted none, true c. Row 2 is not chosen. Exactly 0 is not predicted.
  const at::Tensor logits = floats({1, -1, 0.5, 0, -2, -1, 5, 5, 5}).view({3, 3});
  const at::Tensor targets = floats({1, 1, 0, 0, 0, 1, 0, 0, 0}).view({3, 3});
  // 1 hit, 2 predicted, 3 true: 2·1 / 5.
  for (const at::ScalarType type : {at::kFloat, at::kByte, at::kBool, at::kLong}) {
    EXPECT_DOUBLE_EQ(micro_f1(logits, targets.to(type), longs({0, 1})), 40.0);
  }
  EXPECT_EQ(micro_f1(logits, logits.gt(0), at::arange(3)), 100);
  EXPECT_EQ(micro_f1(floats({-1, NAN}).view({1, 2}), at::zeros({1, 2}), longs({0})), 0);
}

/// By definition: over all pairs of a positive and a negative.
double auc_by_pairs(const std::vector<float>& score, const std::vector<int64_t>& label) {
  double above = 0, pairs = 0;
  for (size_t i = 0; i < score.size(); ++i) {
    for (size_t j = 0; j < score.size(); ++j) {
      if (label[i] != 1 || label[j] != 0) continue;
      above += score[i] > score[j] ? 1 : score[i] == score[j] ? 0.5 : 0;
      ++pairs;
    }
  }
  return 100 * above / pairs;
}

TEST(Metrics, RocAucIsTheShareOfOrderedPairs) {
  std::mt19937 random(1);
  for (const int n : {2, 3, 10, 257}) {
    for (const uint32_t values : {1u, 3u, 1000000u}) {  // all tied, many ties, hardly any
      std::vector<float> score;
      std::vector<int64_t> label;
      for (int i = 0; i < n; ++i) {
        score.push_back(static_cast<float>(random() % values) - 5.0f);
        label.push_back(i < 2 ? i : random() % 2);  // both classes
      }
      const at::Tensor index = at::arange(n);
      // Sums of halves below 2^53 are exact; one division, one product by 100 on each side.
      const double bound = 100 * 4 * 0x1p-52;
      EXPECT_NEAR(roc_auc(floats(score), longs(label), index), auc_by_pairs(score, label), bound) << n << ", " << values;
      EXPECT_EQ(roc_auc(floats(score).view({n, 1}), longs(label).to(at::kFloat).view({n, 1}), index),
                roc_auc(floats(score), longs(label), index));
    }
  }
}

TEST(Metrics, RocAucOfKnownOrders) {
  const at::Tensor scores = floats({-INFINITY, 0.1f, 0.2f, INFINITY, 7});
  EXPECT_EQ(roc_auc(scores, longs({0, 0, 1, 1, -1}), at::arange(4)), 100);
  EXPECT_EQ(roc_auc(scores, longs({1, 1, 0, 0, -1}), at::arange(4)), 0);
  EXPECT_EQ(roc_auc(scores, longs({0, 1, 0, 1, -1}), at::arange(4)), 75);
  EXPECT_TRUE(std::isnan(roc_auc(floats({0, NAN}), longs({0, 1}), at::arange(2))));
}

TEST(Metrics, BadInputIsRefused) {
  const at::Tensor logits = at::zeros({3, 2}), labels = longs({0, 1, 0}), index = at::arange(3);
  const auto acc = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) { return error_of([&] { accuracy(a, b, c); }); };
  const auto f1 = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) { return error_of([&] { micro_f1(a, b, c); }); };
  const auto auc = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) { return error_of([&] { roc_auc(a, b, c); }); };
  EXPECT_EQ(acc({}, labels, index), "[metric] logits must be defined, got an undefined tensor");
  EXPECT_EQ(acc(logits, {}, index), "[metric] labels must be defined, got an undefined tensor");
  EXPECT_EQ(acc(logits, labels, {}), "[metric] index must be defined, got an undefined tensor");
  EXPECT_EQ(acc(logits.to(at::kMeta), labels, index), "[metric] logits must be on cpu or cuda, got meta");
  EXPECT_EQ(acc(labels, labels, index), "[metric] logits must be floats, got Long");
  EXPECT_EQ(acc(logits, logits, index), "[metric] labels must be integers, got Float");
  EXPECT_EQ(acc(logits, labels, index.to(at::kFloat)), "[metric] index must be int32 or int64, got Float");
  EXPECT_EQ(acc(logits, labels, longs({})), "[metric] index must be a line of one node or more, got [0]");
  EXPECT_EQ(acc(logits, labels, longs({0, 3})), "[metric] index must be 0 to 2, got 3");
  EXPECT_EQ(acc(logits, labels, longs({-1})), "[metric] index must be 0 to 2, got -1");
  EXPECT_EQ(acc(logits, longs({0, 2, 0}), index), "[metric] labels must be 0 to 1, got 2");
  EXPECT_EQ(acc(logits, longs({0, -1, 0}), index), "[metric] labels must be 0 to 1, got -1");
  EXPECT_EQ(acc(logits, longs({0, 1}), longs({0})), "[metric] labels must be one a node, got [2]");
  EXPECT_EQ(acc(at::zeros({3}), labels, index), "[metric] logits must be nodes × classes, got [3]");
  EXPECT_EQ(acc(at::zeros({3, 0}), labels, index), "[metric] logits must be nodes × classes, got [3, 0]");
  EXPECT_EQ(f1(logits, at::zeros({3, 1}), index), "[metric] targets must have the logits' sizes, got [3, 1]");
  EXPECT_EQ(f1(logits, at::ones({3, 2}).mul_(0.5), index), "[metric] targets must be 0 or 1, got 0.5");
  EXPECT_EQ(auc(logits, labels, index), "[metric] scores must be one a node, got [3, 2]");
  EXPECT_EQ(auc(at::zeros({3}), longs({0, 1, -1}), index), "[metric] labels must be 0 or 1, got -1");
  EXPECT_EQ(auc(at::zeros({3}), longs({0, 1}), longs({0})), "[metric] labels must be one a node, got [2]");
  EXPECT_EQ(auc(at::zeros({3}), labels, longs({0, 2})), "[metric] both classes must be among the nodes, got 0 only");
  EXPECT_EQ(auc(at::zeros({3}), labels, longs({1})), "[metric] both classes must be among the nodes, got 1 only");
}

TEST(Metrics, MeanIouLeavesAbsentClassesAndIgnoredPixelsOut) {
  const at::Tensor confusion = at::zeros({4, 4}, at::kLong);
  // Truth 0: two of three hit; truth 1: one of two, and one pixel of 0 is said to be 1; class 2 is predicted only; 3 is in neither.
  const at::Tensor truth = at::tensor({0, 0, 0, 1, 1, 255}, at::kByte), said = at::tensor({0, 0, 1, 1, 2, 3}, at::kLong);
  add_confusion(confusion, said, truth, 255);
  add_confusion(confusion, said, truth, 255);  // twice as many of each
  const std::vector<double> ious = class_ious(confusion);
  EXPECT_DOUBLE_EQ(ious[0], 200.0 / 3);
  EXPECT_DOUBLE_EQ(ious[1], 100.0 / 3);
  EXPECT_DOUBLE_EQ(ious[2], 0);
  EXPECT_TRUE(std::isnan(ious[3]));
  EXPECT_DOUBLE_EQ(mean_iou(ious), 100.0 / 3);
  EXPECT_TRUE(std::isnan(mean_iou({std::nan("")})));
}

}  // namespace
}  // namespace satchel
