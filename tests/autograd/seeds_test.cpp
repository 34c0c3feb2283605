// Seeds from (run, step, save): threads do not disturb each other, manual_seed fixes a run, and noise is new in every step.
#include "satchel/autograd/seeds.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/linear.h"
#include "satchel/nn/linear.h"
#include "satchel/nn/norm.h"
#include "tests/autograd/gradient.h"

namespace satchel::test {
namespace {

std::vector<int64_t> numbers(int64_t count) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < count; ++i) all.push_back(fresh_seed(at::kCPU).item<int64_t>());
  return all;
}

TEST(Seeds, ManualSeedFixesARunAgainAndAgain) {
  at::manual_seed(5);
  const std::vector<int64_t> first = numbers(3);
  at::manual_seed(5);
  EXPECT_EQ(numbers(3), first);
  at::manual_seed(5);
  at::randn({5000});  // torch's own draws before the first seed: another run, fixed as well
  const std::vector<int64_t> later = numbers(3);
  EXPECT_NE(later, first);
  for (const int64_t more : {7, 700, 70000}) {
    at::manual_seed(5);
    at::randn({more});
    const std::vector<int64_t> other = numbers(3);
    EXPECT_NE(other, later);
    at::randn({3000});
    at::manual_seed(5);
    at::randn({more});
    EXPECT_EQ(numbers(3), other) << more;
    at::manual_seed(5);
    at::randn({5000});
    EXPECT_EQ(numbers(3), later) << more;
  }
  const at::Tensor state = at::detail::getDefaultCPUGenerator().get_state();
  numbers(2);
  at::randn({10});
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_state(state);  // gone back: a new run too
  EXPECT_NE(numbers(3), later);
  at::manual_seed(6);
  EXPECT_NE(numbers(3), first);
}

TEST(Seeds, TorchsDrawsDoNotChangeARun) {
  at::manual_seed(5);
  const std::vector<int64_t> all = numbers(4);
  at::manual_seed(5);
  std::vector<int64_t> some = numbers(2);
  at::randn({3000});
  for (const int64_t n : numbers(2)) some.push_back(n);
  EXPECT_EQ(some, all);
}

TEST(Seeds, ASeedRunIsItsOwnWhateverTorchDoes) {
  std::vector<int64_t> first, again;
  at::manual_seed(1);
  const std::vector<int64_t> outside = numbers(2);
  {
    const SeedRun run(9);
    first = numbers(3);
  }
  at::manual_seed(2);
  {
    const SeedRun run(9);
    again = numbers(3);
    const SeedRun step(9, 1);
    EXPECT_NE(numbers(3), first);
  }
  EXPECT_EQ(first, again);
  at::manual_seed(1);
  EXPECT_EQ(numbers(2), outside);
}

TEST(Seeds, EveryStepHasItsOwn) {
  at::manual_seed(3);
  std::set<int64_t> all;
  const at::Tensor x = at::randn({16, 8}).requires_grad_();
  for (int step = 0; step < 4; ++step) {
    for (const int64_t n : numbers(3)) all.insert(n);
    satchel::relu(x).sum().backward();
  }
  EXPECT_EQ(all.size(), 12u);
}

TEST(Seeds, InitialWeightsLeaveTorchsGeneratorWhereItWas) {
  at::manual_seed(4);
  const at::Tensor expected = at::randn({5});
  at::manual_seed(4);
  at::Tensor weights;
  {
    const SeededTorch seeded(77);
    weights = at::randn({3});
  }
  EXPECT_TRUE(at::equal(at::randn({5}), expected));
  at::manual_seed(77);
  EXPECT_TRUE(at::equal(at::randn({3}), weights));
}

/// A graph of the same x is held all along: the code that it keeps must not serve the steps that follow.
TEST(Noise, IsNewInEveryStepWhileAnOlderGraphLives) {
  at::manual_seed(8);
  const at::Tensor x = at::randn({64, 32}), g = at::randn({64, 16});
  const auto gradient = [&](const at::Tensor& w) {
    const at::Tensor out = satchel::linear(x, w);
    return gradients_of(out, g, {w})[0];
  };
  const at::Tensor w = at::randn({16, 32}).requires_grad_();
  const at::Tensor held = satchel::linear(x, w);
  const at::Tensor first = gradient(w), second = gradient(w), third = gradient(w);
  EXPECT_FALSE(at::equal(first, second));
  EXPECT_FALSE(at::equal(second, third));
  EXPECT_FALSE(at::equal(first, third));
}

TEST(Noise, IsOneForLayersThatReadTheSameInputInAStep) {
  at::manual_seed(8);
  const at::Tensor x = at::randn({64, 32}), g = at::randn({64, 16}), w = at::randn({16, 32}).requires_grad_();
  const at::Tensor twice = satchel::linear(x, w) + satchel::linear(x, w);
  const at::Tensor both = gradients_of(twice, g, {w})[0];
  at::manual_seed(8);
  at::randn({64, 32}), at::randn({64, 16}), at::randn({16, 32});
  EXPECT_TRUE(at::equal(both, gradients_of(satchel::linear(x, w), g, {w})[0] * 2));
}

/// A small network of this library's layers, trained by hand.
struct Net {
  nn::Linear first, second;
  nn::NormAct between;
  at::Tensor x, target;

  explicit Net(const std::string& method)
      : first(torch::nn::LinearOptions(12, 24), SavePolicy{parse_method(method), "first"}),
        second(torch::nn::LinearOptions(24, 3), SavePolicy{parse_method(method), "second"}),
        between(nn::NormActOptions{.channels = 24, .dropout = 0.3, .saving = {parse_method(method), "between"}}),
        x(at::randn({96, 12})),
        target(at::randn({96, 3})) {}

  void step() {
    const at::Tensor loss = (second(between(first(x))) - target).square().mean();
    std::vector<at::Tensor> all = first->parameters();
    for (const auto& more : {second->parameters(), between->parameters()}) all.insert(all.end(), more.begin(), more.end());
    for (at::Tensor& p : all) p.mutable_grad().reset();
    loss.backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : all) p.sub_(p.grad(), 0.05);
  }
  at::Tensor result() const { return at::cat({first->weight.detach().flatten(), second->weight.detach().flatten()}); }
};

/// Two networks, each in a thread of its own: one thread after the other, or both at once after each has made its first step.
std::vector<at::Tensor> train_two(const std::string& method, bool at_once) {
  at::manual_seed(21);
  Net a(method), b(method);
  at::manual_seed(22);
  std::barrier meet(2);
  const auto run = [&](Net& net, bool waits) {
    const auto meet_if_at_once = [&] {
      if (at_once) meet.arrive_and_wait();
    };
    if (waits) meet_if_at_once();  // the other has drawn its run
    net.step();
    if (!waits) meet_if_at_once();
    meet_if_at_once();
    for (int i = 0; i < 40; ++i) net.step();
  };
  std::thread first([&] { run(a, false); });
  if (!at_once) first.join();
  std::thread second([&] { run(b, true); });
  if (at_once) first.join();
  second.join();
  return {a.result(), b.result()};
}

TEST(Threads, TrainedByHandAtOnceGiveEachTheResultOfItsOwn) {
  for (const char* method : {"satchel", "exact", "fp32"}) {
    const auto alone = train_two(method, false), together = train_two(method, true);
    for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(alone[i], together[i])) << method << ", network " << i;
    EXPECT_FALSE(at::equal(alone[0], alone[1])) << method;
  }
}

}  // namespace
}  // namespace satchel::test
