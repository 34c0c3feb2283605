// The loss over masked labels: what torch gives, in the logits' own memory.
#include "satchel/autograd/loss.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "satchel/autograd/report.h"
#include "satchel/core/error.h"
#include "tests/torch_support.h"

namespace satchel::test {
namespace {

TEST(MaskedLabels, CountRowsOfTheIndex) {
  const at::Tensor labels = at::arange(6), index = at::tensor({4, 0, 3}, at::kLong);
  const MaskedLabels some = masked_labels(labels, index);
  EXPECT_TRUE(at::equal(some.labels, at::tensor({0, -100, -100, 3, 4, -100}, at::kLong)));
  EXPECT_EQ(some.rows, 3);
  EXPECT_TRUE(at::equal(labels, at::arange(6))) << "labels themselves stay";
  const at::Tensor holes = at::tensor({1, -100, 2}, at::kLong);
  EXPECT_EQ(masked_labels(holes).rows, 2);
  EXPECT_EQ(masked_labels(holes, at::tensor({1, 2}, at::kLong)).rows, 1);
}

TEST(MaskedLabels, RefuseWhatCannotBeRight) {
  const at::Tensor labels = at::arange(6);
  const auto at_rows = [&](std::initializer_list<int64_t> rows) { return masked_labels(labels, at::tensor(rows, at::kLong)); };
  EXPECT_THROW(at_rows({0, 6}), Error);
  EXPECT_THROW(at_rows({-1, 2}), Error);
  EXPECT_THROW(at_rows({1, 2, 1}), Error);
  EXPECT_THROW(at_rows({}), Error);
  EXPECT_THROW(masked_labels({}), Error);
  EXPECT_THROW(masked_labels(labels.to(at::kInt)), Error);
  EXPECT_THROW(masked_labels(labels.view({2, 3})), Error);
  EXPECT_THROW(masked_labels(labels, at::ones({6}, at::kBool)), Error);
  EXPECT_THROW(masked_labels(at::full({3}, -100, at::kLong)), Error);
  EXPECT_THROW(masked_labels(at::tensor({0, -1, 2}, at::kLong)), Error);
  EXPECT_NO_THROW(masked_labels(at::tensor({0, -1, 2}, at::kLong), at::tensor({0, 2}, at::kLong))) << "of a row that does not count";
}

TEST(MaskedLoss, EqualsTorchInTheLogitsMemory) {
  at::manual_seed(3);
  for (const int64_t rows : {1, 20, 50}) {
    const at::Tensor x = leaf({50, 12}), labels = at::randint(0, 12, {50}), index = at::randperm(50).narrow(0, 0, rows);
    const MaskedLabels masked = masked_labels(labels, index);
    const at::Tensor expected = at::cross_entropy_loss(x * 1, masked.labels), want = torch::autograd::grad({expected}, {x})[0];
    const at::Tensor logits = x * 1, loss = cross_entropy_(logits, masked);
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6);
    EXPECT_TRUE(at::allclose(logits.detach(), want, 1e-5, 1e-8));
    EXPECT_EQ(total_bytes(saved_tensors(loss)), static_cast<int64_t>(logits.nbytes()));
    const at::Tensor twice = torch::autograd::grad({loss}, {x}, {at::scalar_tensor(2.0)}, /*retain_graph=*/true)[0];
    EXPECT_TRUE(at::allclose(twice, want * 2, 1e-5, 1e-8));
    EXPECT_TRUE(at::allclose(torch::autograd::grad({loss}, {x}, {at::scalar_tensor(3.0)})[0], want * 3, 1e-5, 1e-8));
    EXPECT_NEAR(cross_entropy_(x.detach(), masked).item<double>(), expected.item<double>(), 1e-6) << "without gradients";
  }
}

/// A power of two scales gradients exactly, and never the loss.
TEST(Loss, ScalesGradientsAlone) {
  at::manual_seed(5);
  constexpr double kScale = 0x1p17;
  const int64_t rows = 300, classes = 7;
  const at::Tensor labels = at::randint(0, classes, {rows}), index = at::arange(0, rows, 2), targets = at::rand({rows, classes});
  const MaskedLabels masked = masked_labels(labels, index);
  const std::vector<std::function<at::Tensor(const at::Tensor&, double)>> losses = {
      [&](const at::Tensor& x, double s) { return cross_entropy_(x, masked, "loss", s); },
      [&](const at::Tensor& x, double s) { return cross_entropy_(x, labels, index, "loss", s); },
      [&](const at::Tensor& x, double s) { return binary_cross_entropy_(x, targets, index, "loss", s); },
      [&](const at::Tensor& x, double s) {
        return with_scaled_gradient(at::cross_entropy_loss(x.index_select(0, index), labels.index_select(0, index)), s);
      }};
  const at::Tensor values = at::randn({rows, classes});
  for (const auto& loss_of : losses) {
    const auto run = [&](double scale) {
      const at::Tensor x = values.clone().requires_grad_(), loss = loss_of(x * 1, scale);
      return std::pair{loss.detach(), torch::autograd::grad({loss}, {x})[0]};
    };
    const auto [loss, gradient] = run(1);
    const auto [same_loss, scaled] = run(kScale);
    EXPECT_TRUE(at::equal(same_loss, loss));
    EXPECT_TRUE(at::equal(scaled, gradient * kScale));
  }
  for (const double bad : {0.0, -1.0, std::numeric_limits<double>::infinity()})
    EXPECT_THROW(cross_entropy_(leaf({rows, classes}) * 1, masked, "loss", bad), Error);
}

TEST(MaskedLoss, OfFloat16HasFloat32sScaledGradientRounded) {
  at::manual_seed(6);
  const int64_t rows = 1 << 15;
  const at::Tensor x = at::randn({rows, 5}).mul_(2).to(at::kHalf).requires_grad_(), wide = x.detach().to(at::kFloat).requires_grad_();
  const MaskedLabels masked = masked_labels(at::randint(0, 5, {rows}));
  const double scale = static_cast<double>(rows);
  const auto gradient = [&](const at::Tensor& leaf, double s) {
    return torch::autograd::grad({cross_entropy_(leaf * 1, masked, "loss", s)}, {leaf})[0];
  };
  const at::Tensor scaled = gradient(x, scale);
  EXPECT_TRUE(at::equal(scaled, gradient(wide, scale).to(at::kHalf)));
  // p becomes 0 below 2^−25, from logits 17.3 apart on: 6 deviations of a difference here, 2.8. Without a scale p/2^15 does, so p below
  // 2^−10, from 6.9 apart on: 2.4 deviations.
  EXPECT_FALSE(scaled.eq(0).any().item<bool>());
  EXPECT_TRUE(gradient(x, 1).eq(0).any().item<bool>());
}

TEST(MaskedLoss, OfHalfWidthLogitsIsComputedInFloat32) {
  at::manual_seed(4);
  const at::Tensor x = at::randn({200, 9}).to(at::kBFloat16).requires_grad_();
  const MaskedLabels masked = masked_labels(at::randint(0, 9, {200}), at::arange(0, 200, 2));
  const at::Tensor exact = x.detach().to(at::kFloat).requires_grad_(), expected = at::cross_entropy_loss(exact, masked.labels);
  const at::Tensor want = torch::autograd::grad({expected}, {exact})[0], logits = x * 1, loss = cross_entropy_(logits, masked);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6);
  const at::Tensor got = torch::autograd::grad({loss}, {x})[0];
  EXPECT_EQ(got.scalar_type(), at::kBFloat16);
  // One rounding to bfloat16: 2^−8 of the value.
  EXPECT_TRUE(at::allclose(got.to(at::kFloat), want, 0x1.01p-8, 1e-8));
}

TEST(MaskedLoss, ShowsWhatIsNotANumberWhereItCounts) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const at::Tensor x = at::randn({6, 4});
    x[1][2] = bad;
    const MaskedLabels with = masked_labels(at::zeros({6}, at::kLong), at::arange(0, 3)),
                       without = masked_labels(at::zeros({6}, at::kLong), at::arange(2, 6));
    const at::Tensor first = x.clone().requires_grad_() * 1, second = x.clone().requires_grad_() * 1;
    EXPECT_TRUE(cross_entropy_(first, with).isnan().item<bool>());
    EXPECT_TRUE(at::equal(first.detach().isnan().any(1), at::arange(6).eq(1))) << "its row alone";
    EXPECT_TRUE(cross_entropy_(second, without).isfinite().item<bool>());
    EXPECT_TRUE(at::equal(second.detach().narrow(0, 0, 2), at::zeros({2, 4})));
  }
}

TEST(MaskedLoss, RefusesWhatDoesNotFit) {
  const MaskedLabels five = masked_labels(at::zeros({5}, at::kLong));
  EXPECT_THROW(cross_entropy_(leaf({5, 3}), five), Error);
  EXPECT_THROW(cross_entropy_(leaf({4, 3}) * 1, five), Error);
  EXPECT_THROW(cross_entropy_(leaf({5, 3}) * 1, MaskedLabels{five.labels, 0}), Error);
  EXPECT_THROW(cross_entropy_(leaf({5, 3}) * 1, MaskedLabels{five.labels, 4}), Error);
  EXPECT_THROW(cross_entropy_(leaf({5, 3}) * 1, MaskedLabels{}), Error);
  const at::Tensor x = leaf({5, 3}), logits = x * 1, both = cross_entropy_(logits, five) + cross_entropy_(logits, five);
  EXPECT_THROW(torch::autograd::grad({both}, {x}), Error) << "logits serve one loss";
}

TEST(Loss, OfARowThatIsNamedTwiceCountsItTwice) {
  at::manual_seed(7);
  const at::Tensor x = leaf({10, 4}), labels = at::randint(0, 4, {10}), index = at::tensor({1, 3, 1, 7, 1}, at::kLong);
  const at::Tensor targets = at::rand({10, 4});
  const auto chosen = [&](const at::Tensor& t) { return t.index_select(0, index); };
  const at::Tensor want = torch::autograd::grad({at::cross_entropy_loss(chosen(x), chosen(labels))}, {x})[0];
  EXPECT_TRUE(at::allclose(torch::autograd::grad({cross_entropy_(x * 1, labels, index)}, {x})[0], want, 1e-5, 1e-7));
  EXPECT_TRUE(at::allclose(torch::autograd::grad({cross_entropy(x, labels, index)}, {x})[0], want, 1e-5, 1e-7));
  const at::Tensor two = torch::autograd::grad({at::binary_cross_entropy_with_logits(chosen(x), chosen(targets))}, {x})[0];
  EXPECT_TRUE(at::allclose(torch::autograd::grad({binary_cross_entropy_(x * 1, targets, index)}, {x})[0], two, 1e-5, 1e-7));
}

TEST(Loss, WithoutAnUnderscoreLeavesTheLogitsAlone) {
  at::manual_seed(8);
  const at::Tensor x = leaf({50, 12}), labels = at::randint(0, 12, {50}), index = at::randperm(50).narrow(0, 0, 20);
  const MaskedLabels masked = masked_labels(labels, index);
  const at::Tensor before = x.detach().clone(), expected = at::cross_entropy_loss(x.index_select(0, index), labels.index_select(0, index));
  const at::Tensor want = torch::autograd::grad({expected}, {x})[0];
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> losses = {
      [&](const at::Tensor& logits) { return cross_entropy(logits, labels, index); },
      [&](const at::Tensor& logits) { return cross_entropy(logits, masked); }};
  for (const auto& loss_of : losses) {
    const at::Tensor logits = x * 1, loss = loss_of(logits), second = loss_of(logits), of_leaf = loss_of(x);
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6);
    EXPECT_TRUE(at::equal(logits.detach(), before) && at::equal(x.detach(), before));
    EXPECT_EQ(total_bytes(packed_tensors(loss)), static_cast<int64_t>(logits.nbytes()));
    EXPECT_TRUE(at::allclose(torch::autograd::grad({loss + second}, {x})[0], want * 2, 1e-5, 1e-8)) << "logits may serve two losses";
    EXPECT_TRUE(at::allclose(torch::autograd::grad({of_leaf}, {x})[0], want, 1e-5, 1e-8)) << "and may be a leaf";
  }
  const at::Tensor all = cross_entropy(x, labels);
  EXPECT_TRUE(
      at::allclose(torch::autograd::grad({all}, {x})[0], torch::autograd::grad({at::cross_entropy_loss(x, labels)}, {x})[0], 1e-5, 1e-8));
}

TEST(Loss, NamesTheLabelOrIndexThatIsWrong) {
  const at::Tensor logits = leaf({5, 3}) * 1, labels = at::zeros({5}, at::kLong);
  const auto message = [&](const at::Tensor& l, const at::Tensor& index) -> std::string {
    try {
      cross_entropy_(logits, l, index);
    } catch (const Error& e) {
      return e.what();
    }
    return "nothing was thrown";
  };
  EXPECT_EQ(message(labels, at::tensor({0, 5}, at::kLong)), "[cross_entropy_] index must be 0 to 4, got 5");
  EXPECT_EQ(message(labels + 3, {}), "[cross_entropy_] labels must be 0 to 2, got 3");
  EXPECT_EQ(message(labels - 100, {}), "[cross_entropy_] labels must be 0 to 2, got -100");
}

}  // namespace
}  // namespace satchel::test
