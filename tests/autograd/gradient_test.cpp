// Every function through the shared test, and what single functions promise beside it.
#include "tests/autograd/gradient.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/loss.h"
#include "satchel/autograd/norm.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/report.h"
#include "satchel/core/error.h"
#include "tests/support.h"
#include "tests/torch_support.h"

namespace satchel::test {
namespace {

/// One case: --gtest_filter='GradientCases.*/batch_relu_satchel'.
class GradientCases : public testing::TestWithParam<CaseMethod> {};
class GradientCasesAt32Bits : public testing::TestWithParam<CaseMethod> {};

TEST_P(GradientCasesAt32Bits, EqualTorch) { expect_exact(GetParam().c, GetParam().method); }
TEST_P(GradientCases, AreRightOnAverage) { expect_unbiased(GetParam().c, GetParam().method); }
TEST_P(GradientCases, AreTheSameAgainWithRetainGraph) { expect_retained(GetParam().c, GetParam().method); }
TEST_P(GradientCases, ReportAllSavesAndFreeThemInBackward) { expect_bytes(GetParam().c, GetParam().method); }
TEST_P(GradientCases, SaveNothingWithoutGradients) { expect_nothing_without_gradients(GetParam().c, GetParam().method); }

INSTANTIATE_TEST_SUITE_P(, GradientCasesAt32Bits, testing::ValuesIn(with_exact_methods()), kCaseName);
INSTANTIATE_TEST_SUITE_P(, GradientCases, testing::ValuesIn(with_noisy_methods()), kCaseName);

TEST(Saves, FrozenWeightKeepsNoInput) {
  const at::Tensor x = leaf({64, 32}), w = at::randn({16, 32});
  const at::Tensor out = satchel::linear(x, w);
  EXPECT_EQ(total_bytes(saved_tensors(out)), 0);
  const at::Tensor g = at::randn({64, 16});
  EXPECT_TRUE(at::allclose(gradients_of(out, g, {x})[0], g.matmul(w)));
}

/// A chain's output and, where the next layer finds its save, no second one.
int64_t bytes_with_next(const std::function<at::Tensor(const at::Tensor&)>& between) {
  at::manual_seed(1);
  const NormWeights weights{leaf({32}), leaf({32}), {}, {}};
  const at::Tensor h = leaf({256, 32}), w = leaf({8, 32});
  NormActOptions options;
  options.dropout = 0.5;
  const at::Tensor z = norm_act(h, weights, options);
  return total_bytes(saved_tensors(satchel::linear(between(z), w))) - total_bytes(saved_tensors(z));
}

TEST(SharedSave, IsFoundOnlyThroughTheUntouchedOutput) {
  EXPECT_EQ(bytes_with_next([](const at::Tensor& z) { return z; }), 0);
  const int64_t own = bytes_with_next([](const at::Tensor& z) { return z * 2; });
  EXPECT_GT(own, 256 * 32 / 4);
  EXPECT_EQ(bytes_with_next([](const at::Tensor& z) { return z.view({256, 32}); }), own);
  EXPECT_EQ(bytes_with_next([](const at::Tensor& z) { return z.clone().mul_(2); }), own);
}

TEST(SharedSave, ChangedInPlaceIsNotShared) {
  at::manual_seed(1);
  const NormWeights weights{leaf({32}), leaf({32}), {}, {}};
  at::Tensor z = norm_act(leaf({256, 32}), weights, {});
  z.detach().add_(1);  // same node, other values
  EXPECT_GT(total_bytes(saved_tensors(satchel::linear(z, leaf({8, 32})))), total_bytes(saved_tensors(z)));
}

TEST(SharedSave, AnOptimizerStepBeforeBackwardDoesNotChangeTheDecoding) {
  for (const char* method : {"satchel", "satchel,bits=32", "satchel,side=none"}) {
    std::vector<std::vector<at::Tensor>> runs;
    for (const bool step : {false, true}) {
      at::manual_seed(4);
      const NormWeights weights{leaf({32}), leaf({32}), {}, {}};
      const at::Tensor h = leaf({128, 32}), w = leaf({8, 32});
      const at::Tensor out = satchel::linear(norm_act(h, weights, {}, {parse_method(method), ""}), w, {}, {parse_method(method), ""});
      if (step) {
        weights.gamma.detach().mul_(-3);
        weights.beta.detach().add_(7);
      }
      runs.push_back(gradients_of(out, at::ones_like(out), {h, weights.gamma, weights.beta, w}));
    }
    for (size_t i = 0; i < runs[0].size(); ++i) EXPECT_TRUE(at::equal(runs[0][i], runs[1][i])) << method << ", gradient " << i;
  }
}

TEST(Saves, ChangedWeightIsAnErrorAsInTorch) {
  const at::Tensor x = leaf({16, 8}), w = leaf({4, 8});
  const at::Tensor out = satchel::linear(x, w);
  w.detach().add_(1);
  EXPECT_ANY_THROW(gradients_of(out, at::ones_like(out), {x}));
}

TEST(Saves, GradientsOfGradientsAreRefused) {
  const at::Tensor x = leaf({16, 8});
  const at::Tensor out = satchel::relu(x);
  EXPECT_THROW(torch::autograd::grad({out}, {x}, {at::ones_like(out)}, true, /*create_graph=*/true), Error);
}

TEST(NonFinite, ValuesAreNotHidden) {
  at::manual_seed(2);
  const NormWeights weights{leaf({32}), leaf({32}), {}, {}};
  at::Tensor h = at::randn({64, 32});
  h[3][5] = std::numeric_limits<float>::quiet_NaN();
  h.requires_grad_();
  const at::Tensor out = norm_act(h, weights, {});
  EXPECT_TRUE(out.isnan().any().item<bool>());
  const auto gradients = gradients_of(out, at::ones_like(out), {h, weights.gamma});
  EXPECT_TRUE(gradients[0].isnan().any().item<bool>() && gradients[1].isnan().any().item<bool>());
}

TEST(Loss, TurnsLogitsIntoTheirGradientInPlace) {
  const at::Tensor x = leaf({50, 12}), labels = at::randint(0, 12, {50}), index = at::randperm(50).narrow(0, 0, 20);
  const at::Tensor want =
      torch::autograd::grad({at::cross_entropy_loss((x * 1).index_select(0, index), labels.index_select(0, index))}, {x})[0];
  const at::Tensor logits = x * 1;
  const at::Tensor loss = cross_entropy_(logits, labels, index);
  EXPECT_NEAR(loss.item<double>(), at::cross_entropy_loss(x.detach().index_select(0, index), labels.index_select(0, index)).item<double>(),
              1e-6);
  EXPECT_TRUE(at::allclose(logits.detach(), want, 1e-5, 1e-8));
  EXPECT_EQ(total_bytes(saved_tensors(loss)), static_cast<int64_t>(logits.nbytes()));
  const at::Tensor twice = torch::autograd::grad({loss}, {x}, {at::scalar_tensor(2.0)}, /*retain_graph=*/true)[0];
  EXPECT_TRUE(at::allclose(twice, want * 2, 1e-5, 1e-8));
  EXPECT_TRUE(at::allclose(torch::autograd::grad({loss}, {x})[0], want, 1e-5, 1e-8));
}

TEST(Loss, BinaryEqualsTorch) {
  const at::Tensor x = leaf({50, 3}), targets = at::rand({50, 3}), index = at::randperm(50).narrow(0, 0, 20);
  const at::Tensor want =
      torch::autograd::grad({at::binary_cross_entropy_with_logits((x * 1).index_select(0, index), targets.index_select(0, index))}, {x})[0];
  const at::Tensor loss = binary_cross_entropy_(x * 1, targets, index);
  EXPECT_TRUE(at::allclose(torch::autograd::grad({loss}, {x})[0], want, 1e-5, 1e-8));
}

TEST(Loss, RefusesToServeTwiceOrToBeChanged) {
  const at::Tensor x = leaf({20, 6}), labels = at::randint(0, 6, {20});
  const at::Tensor logits = x * 1;
  const at::Tensor both = cross_entropy_(logits, labels, at::arange(10)) + cross_entropy_(logits, labels, at::arange(10, 20));
  EXPECT_THROW(torch::autograd::grad({both}, {x}), Error);
  const at::Tensor others = x * 1, loss = cross_entropy_(others, labels);
  others.detach().zero_();
  EXPECT_THROW(torch::autograd::grad({loss}, {x}), Error);
  EXPECT_THROW(cross_entropy_(leaf({40, 3}).view({20, 6}), labels), Error);
}

TEST(Saves, AreGoneFromTheReportAfterBackward) {
  const NormWeights weights{leaf({32}), leaf({32}), {}, {}};
  for (const char* method : {"satchel", "exact"}) {
    const SavePolicy saving{parse_method(method), ""};
    NormActOptions options;
    options.dropout = 0.5;
    const at::Tensor z = satchel::linear(norm_act(leaf({256, 32}), weights, options, saving), leaf({8, 32}), {}, saving);
    const at::Tensor loss = cross_entropy_(z, at::zeros({256}, at::kLong));
    EXPECT_GT(total_bytes(saved_tensors(loss)), 0);
    loss.backward();
    EXPECT_EQ(total_bytes(saved_tensors(loss)), 0) << method;
  }
}

/// In evaluation with gradients the running statistics are constants.
TEST(Norms, EvaluationWithGradientsEqualsTorch) {
  for (const char* method : {"satchel,bits=32", "exact,bits=32,project=none"}) {
    const SavePolicy saving{parse_method(method), ""};
    for (const bool frozen : {false, true}) {
      at::manual_seed(8);
      NormWeights weights{leaf({16}), leaf({16}), at::randn({16}), at::rand({16}) + 0.5};
      if (frozen) weights.gamma = weights.gamma.detach();
      const at::Tensor x = leaf({40, 16}), g = at::randn({40, 16});
      NormOptions evaluation;
      evaluation.training = false;
      const Inputs inputs = frozen ? Inputs{x, weights.beta} : Inputs{x, weights.gamma, weights.beta};
      const auto want = gradients_of(
          at::batch_norm(x, weights.gamma, weights.beta, weights.running_mean, weights.running_var, false, 0.1, 1e-5, false), g, inputs);
      const at::Tensor out = batch_norm(x, weights, evaluation, saving);
      weights.running_mean.add_(3);  // as a training step in between would
      const auto got = gradients_of(out, g, inputs);
      for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::allclose(got[i], want[i], 1e-4, 1e-5)) << method << frozen << i;
      if (!frozen) continue;
      EXPECT_LE(total_bytes(saved_tensors(batch_norm(x, weights, evaluation, saving))), 16 * 4) << method;
    }
  }
}

TEST(SharedSave, ServesTwoLayersAndManyStretches) {
  at::manual_seed(6);
  const SavePolicy saving{parse_method("satchel,bits=32"), ""};
  const NormWeights weights{leaf({32}), leaf({32}), {}, {}};
  const at::Tensor h = leaf({20000, 32}), a = leaf({4, 32}), b = leaf({5, 32}), g = at::randn({20000, 9});  // 2.4 stretches of 2^18 values
  const Inputs inputs{h, weights.gamma, weights.beta, a, b};
  const auto run = [&](bool ours) {
    const at::Tensor y = at::batch_norm(h, weights.gamma, weights.beta, {}, {}, true, 0.1, 1e-5, false);
    const at::Tensor z = ours ? norm_act(h, weights, {}, saving) : at::relu(y);
    const at::Tensor out = ours ? at::cat({satchel::linear(z, a, {}, saving), satchel::linear(z, b, {}, saving)}, 1)
                                : at::cat({at::linear(z, a), at::linear(z, b)}, 1);
    return gradients_of(out, g, inputs);
  };
  const auto want = run(false), got = run(true);
  for (size_t i = 0; i < want.size(); ++i) {
    // Sums of 20,000 float32 terms in another order: 2^−24·√20000 of the largest, twenty times over.
    EXPECT_LE((got[i] - want[i]).abs().max().item<double>(), 2e-4 * want[i].abs().max().item<double>()) << i;
  }
}

TEST(Refuses, WhatItWouldGetWrong) {
  EXPECT_THROW(satchel::elu(leaf({4, 4}), -1.0), Error);
  EXPECT_THROW(satchel::dropout(at::randn({4, 4}, at::kDouble).requires_grad_(), 0.5), Error);
  EXPECT_THROW(satchel::dropout(leaf({4, 4}), 1.0), Error);
  EXPECT_THROW(satchel::linear(at::randn({4, 4}, at::kDouble).requires_grad_(), at::randn({4, 4}, at::kDouble)), Error);
}

TEST(Loss, RefusesWhatItCannotWriteOver) {
  const at::Tensor labels = at::zeros({5}, at::kLong);
  EXPECT_THROW(cross_entropy_(leaf({5, 3}), labels), Error);
  EXPECT_THROW(cross_entropy_(leaf({5, 3}) * 1, at::zeros({4}, at::kLong)), Error);
  EXPECT_THROW(cross_entropy_(leaf({5, 3}) * 1, labels, at::empty({0}, at::kLong)), Error);
}

}  // namespace
}  // namespace satchel::test
