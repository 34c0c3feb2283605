// Every function through the shared test, and what single functions promise beside it.
#include "tests/autograd/gradient.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/loss.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/report.h"
#include "satchel/core/error.h"

namespace satchel::test {
namespace {

TEST(Gradients, EqualTorchAt32Bits) {
  for (const GradientCase& c : autograd_cases()) {
    for (const std::string& method : c.exact_methods) expect_exact(c, method);
  }
}

TEST(Gradients, AreRightOnAverage) {
  for (const GradientCase& c : autograd_cases()) {
    for (const std::string& method : c.noisy_methods) expect_unbiased(c, method);
  }
}

TEST(Gradients, AreTheSameAgainWithRetainGraph) {
  for (const GradientCase& c : autograd_cases()) {
    for (const std::string& method : c.noisy_methods) expect_retained(c, method);
  }
}

TEST(Saves, AreAllReportedAndFreedByBackward) {
  for (const GradientCase& c : autograd_cases()) {
    for (const std::string& method : c.noisy_methods) expect_bytes(c, method);
  }
}

TEST(Saves, AreNotMadeWithoutGradients) {
  for (const GradientCase& c : autograd_cases()) {
    for (const std::string& method : c.noisy_methods) expect_nothing_without_gradients(c, method);
  }
}

at::Tensor leaf(at::IntArrayRef shape) { return at::randn(shape).requires_grad_(); }

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

TEST(Loss, RefusesWhatItCannotWriteOver) {
  const at::Tensor labels = at::zeros({5}, at::kLong);
  EXPECT_THROW(cross_entropy_(leaf({5, 3}), labels), Error);
  EXPECT_THROW(cross_entropy_(leaf({5, 3}) * 1, at::zeros({4}, at::kLong)), Error);
  EXPECT_THROW(cross_entropy_(leaf({5, 3}) * 1, labels, at::empty({0}, at::kLong)), Error);
}

}  // namespace
}  // namespace satchel::test
