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

#include <cmath>
#include <limits>
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

/// Scaled gradients move parameters as the gradients themselves do, clipped or not; what is not finite marks this loss and all after it.
TEST(ParameterStep, UnscalesExactlyAndMarksWhatIsNotFinite) {
  at::manual_seed(3);
  for (const Optimizer kind : {Optimizer::adam, Optimizer::adamw, Optimizer::sgd}) {
    for (const double clip : {0.0, 0.5}) {
      TrainOptions o;
      o.optimizer = kind;
      o.clip = clip;
      at::Tensor plain = at::randn({6, 3}), own = plain.clone();
      plain.requires_grad_();
      own.requires_grad_();
      ParameterStep one(o, {plain}), scaled(o, {own}, 0x1p17);
      const at::Tensor loss = at::full({}, 2.5f);
      for (int i = 0; i < 3; ++i) {
        const at::Tensor g = at::randn({6, 3});
        plain.mutable_grad() = g.clone();
        own.mutable_grad() = g * 0x1p17;
        one.step();
        scaled.step();
        EXPECT_TRUE(at::equal(plain, own));
        EXPECT_TRUE(at::equal(scaled.marked(loss), loss));
      }
      own.mutable_grad() = at::full({6, 3}, 1.0f);
      own.mutable_grad()[2][1] = std::numeric_limits<float>::infinity();
      scaled.step();
      EXPECT_FALSE(std::isfinite(scaled.marked(loss).item<float>()));
      own.mutable_grad() = at::full({6, 3}, 1.0f);
      scaled.step();
      EXPECT_FALSE(std::isfinite(scaled.marked(loss).item<float>())) << "it stays so";
      EXPECT_TRUE(one.marked(loss).is_same(loss));
    }
  }
  TrainOptions o;
  for (const double bad : {0.0, 3.0, -2.0, std::numeric_limits<double>::infinity(), std::nan("")})
    EXPECT_THROW(ParameterStep(o, {at::zeros({1})}, bad), Error) << bad;
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
