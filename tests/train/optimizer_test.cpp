// The fused optimizers against torch's own, clipping, and their state.
#include "satchel/train/optimizer.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>

#include "satchel/core/error.h"

namespace satchel {
namespace {

/// Largest difference after five steps of torch's own optimizer and ours on the same gradients.
double optimizer_difference(const TrainOptions& o, torch::optim::Optimizer& theirs, at::Tensor& own, at::Tensor& reference) {
  ParameterStep step(o, {own});
  for (int i = 0; i < 5; ++i) {
    const at::Tensor g = at::randn({7, 5});
    own.mutable_grad() = g.clone();
    reference.mutable_grad() = g.clone();
    step.step();
    theirs.step();
  }
  return (own - reference).abs().max().item<double>();
}

TEST(ParameterStep, IsTorchs) {
  at::manual_seed(1);
  for (const Optimizer kind : {Optimizer::adam, Optimizer::adamw, Optimizer::sgd}) {
    at::Tensor own = at::randn({7, 5}), reference = own.clone();
    own.requires_grad_();
    reference.requires_grad_();
    TrainOptions o;
    o.optimizer = kind;
    o.weight_decay = 0.1;
    std::unique_ptr<torch::optim::Optimizer> theirs;
    const std::vector<at::Tensor> list{reference};
    if (kind == Optimizer::adam) theirs = std::make_unique<torch::optim::Adam>(list, torch::optim::AdamOptions(o.lr).weight_decay(0.1));
    if (kind == Optimizer::adamw) theirs = std::make_unique<torch::optim::AdamW>(list, torch::optim::AdamWOptions(o.lr).weight_decay(0.1));
    if (kind == Optimizer::sgd)
      theirs = std::make_unique<torch::optim::SGD>(list, torch::optim::SGDOptions(o.lr).momentum(0.9).weight_decay(0.1));
    // Values up to 4 and five roundings of 2^−24 of them each step, in a different order: 5·5·4·2^−24.
    EXPECT_LE(optimizer_difference(o, *theirs, own, reference), 100 * 0x1p-24) << static_cast<int>(kind);
  }
}

TEST(ParameterStep, ClipsTheNormOfAllGradientsTogether) {
  at::Tensor a = at::zeros({2}), b = at::zeros({1});
  a.requires_grad_();
  b.requires_grad_();
  TrainOptions o;
  o.optimizer = Optimizer::sgd;
  o.momentum = 0;
  o.lr = 1;
  o.clip = 1;
  ParameterStep step(o, {a, b});
  a.mutable_grad() = at::full({2}, 2.0f);  // norm of (2, 2, 1) is 3
  b.mutable_grad() = at::full({1}, 1.0f);
  step.step();
  // 1/(3 + 1e-6) instead of 1/3: 2·1.1e-7, and rounding.
  EXPECT_NEAR(a[0].item<double>(), -2.0 / 3, 4e-7);
  EXPECT_NEAR(b[0].item<double>(), -1.0 / 3, 4e-7);
}

/// A state that is taken and given back continues bit for bit; another optimizer's is refused.
TEST(ParameterStep, RestoresItsState) {
  at::manual_seed(2);
  for (const Optimizer kind : {Optimizer::adam, Optimizer::adamw, Optimizer::sgd}) {
    TrainOptions o;
    o.optimizer = kind;
    at::Tensor whole = at::randn({3, 4}), part = whole.clone();
    whole.requires_grad_();
    part.requires_grad_();
    ParameterStep one(o, {whole}), first(o, {part});
    const auto move = [](ParameterStep& step, at::Tensor& p, const at::Tensor& g) {
      p.mutable_grad() = g.clone();
      step.step();
    };
    const at::Tensor g = at::randn({3, 4}), h = at::randn({3, 4});
    move(one, whole, g);
    move(one, whole, h);
    move(first, part, g);
    ParameterStep second(o, {part});
    second.restore(first.state());
    move(second, part, h);
    EXPECT_TRUE(whole.equal(part)) << static_cast<int>(kind);
    o.optimizer = kind == Optimizer::sgd ? Optimizer::adam : Optimizer::sgd;
    ParameterStep other(o, {part});
    EXPECT_THROW(other.restore(first.state()), Error);
  }
}

}  // namespace
}  // namespace satchel
