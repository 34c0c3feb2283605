// Maps that layers share, in 2 or 3 bits under a mean: what a RunningBitAllocator gives them, what it remembers, and what a loss scale does
// to it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "satchel/autograd/conv.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/report.h"
#include "satchel/core/allocate.h"
#include "satchel/core/error.h"
#include "satchel/core/method.h"
#include "satchel/plan/bit_allocator.h"

namespace satchel {
namespace {

LayerNeed map_of(int64_t values, double mean, std::vector<double> gains) { return {values, mean, std::move(gains), true}; }

TEST(ShareMaps, NeverExceedTheMeanAndMoreNeverPredictsMoreError) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<LayerNeed> layers(1 + random() % 30);
    for (LayerNeed& l : layers) {
      l = map_of(256 * (1 + static_cast<int64_t>(random() % 1000)), 2, std::vector<double>(1 + random() % 40));
      const double scale = std::exp(3 * normal(random));
      for (double& c : l.sensitivity) c = scale * std::exp(normal(random));
    }
    double before = INFINITY;
    for (const double mean : {2.0, 2.1, 2.25, 2.5, 2.9, 3.0}) {
      double spent = 0, budget = 0, left = 0;
      for (LayerNeed& l : layers) l.base = mean;
      const std::vector<double> means = allocate_layers(layers);
      for (size_t l = 0; l < layers.size(); ++l) {
        EXPECT_GE(means[l], 2);
        EXPECT_LE(means[l], 3);
        const auto n = static_cast<double>(layers[l].sensitivity.size());
        spent += static_cast<double>(layers[l].values) * n * means[l];
        budget += static_cast<double>(layers[l].values) * n * mean;
        std::vector<double> gains = layers[l].sensitivity;  // what is not gained is what is left
        std::ranges::sort(gains);
        const auto two = gains.size() - static_cast<size_t>(samples_of_three(means[l], static_cast<int64_t>(gains.size())));
        for (size_t i = 0; i < two; ++i) left += gains[i];
      }
      EXPECT_LE(spent, budget * (1 + 30 * 0x1p-53)) << mean;  // sums of at most 30 doubles
      EXPECT_LE(left, before * (1 + 0x1p-40)) << mean;
      before = left;
    }
    EXPECT_EQ(before, 0) << "at 3 all have 3 bits";
  }
}

TEST(ShareMaps, WhatGainsMoreAValueComesFirst) {
  // A fourth of the values may have 3 bits: the small loud layer's all. Inputs beside them are shared out by themselves.
  const std::vector<double> means = allocate_layers({map_of(3000, 2.25, {1, 1}), map_of(1000, 2.25, {50, 50}), {100, 2, {1}, false}});
  EXPECT_EQ(means, (std::vector<double>{2, 3, 2}));
  EXPECT_EQ(samples_of_three(2.25, 32), 8);
  EXPECT_EQ(samples_of_three(2.1, 32), 3);
  EXPECT_EQ(samples_of_three(2, 32), 0);
  EXPECT_EQ(samples_of_three(3, 32), 32);
  EXPECT_EQ(samples_of_three(2 + 1.0 / 3, 3), 1);
}

/// One step of two maps of four samples, whose readers' gradients have these squared norms.
struct Step {
  BitAllocation a, b;
};
Step run(RunningBitAllocator& allocator, double loud, double mean = 2.5, double scale = 1) {
  Step s{allocator.image("a", 4, 512, mean, at::kCPU), allocator.image("b", 4, 512, mean, at::kCPU)};
  const at::Tensor ranges = at::tensor({1.0, 2.0, 4.0, 3.0}, at::kDouble);
  if (allocator.wants_gradient(0)) {
    allocator.saw_gradient(1, at::full({4}, scale * scale), ranges, 1);
    allocator.saw_gradient(0, at::full({4}, loud * scale * scale), ranges, 1);
  }
  allocator.step();
  return s;
}

TEST(ShareMaps, StartEvenlyAndFollowTheGains) {
  RunningBitAllocator allocator({0, 1});
  for (int step = 0; step < 4; ++step) {
    const Step s = run(allocator, 100);
    EXPECT_LE(allocator.mean_bits(), 2.5);
    if (step < 3) {  // seen, copied, worked on
      EXPECT_EQ(s.a.count, 2);
      EXPECT_TRUE(s.a.slots.equal(at::tensor({0, 1, -1, -1}, at::kInt))) << "nothing is known of samples";
      EXPECT_EQ(s.b.count, 2);
    } else {
      EXPECT_EQ(s.a.count, 4);
      EXPECT_FALSE(s.a.slots.defined()) << "all of them";
      EXPECT_EQ(s.b.count, 0);
    }
  }
}

TEST(ShareMaps, SamplesThatCountGetTheBits) {
  RunningBitAllocator allocator({8, 100});
  const std::vector<int64_t> numbers{7, 2, 4, 0};
  allocator.set_samples(numbers);
  run(allocator, 1);
  allocator.set_samples(numbers);
  // Ranges 1, 2, 4, 3 with equal gradients: the third and the fourth.
  EXPECT_TRUE(allocator.image("a", 4, 512, 2.5, at::kCPU).slots.equal(at::tensor({-1, -1, 0, 1}, at::kInt)));
  allocator.set_samples(std::vector<int64_t>{4, 7, 0, 2});
  EXPECT_TRUE(allocator.image("a", 4, 512, 2.5, at::kCPU).slots.equal(at::tensor({0, -1, 1, -1}, at::kInt)));
}

TEST(ShareMaps, AnotherMeanChoosesAnew) {
  RunningBitAllocator allocator({8, 100});
  const std::vector<int64_t> numbers{7, 2, 4, 0};
  allocator.set_samples(numbers);
  run(allocator, 1, 2.75);
  allocator.set_samples(numbers);
  // Places 0 … 2 were chosen for a mean of 2.75; at 2.25 a plane has room for one of four samples.
  const BitAllocation share = allocator.image("a", 4, 512, 2.25, at::kCPU);
  EXPECT_EQ(share.count, 1);
  EXPECT_EQ(share.slots.max().item<int>(), 0);
}

TEST(ShareMaps, ALossScaleCancels) {
  const auto averages = [](double first, double second) {
    RunningBitAllocator allocator({4, 1});
    const at::Tensor scale = at::full({1}, first);
    allocator.set_gradient_scale(scale);
    for (int step = 0; step < 8; ++step) {
      allocator.set_samples(std::vector<int64_t>{0, 1, 2, 3});
      run(allocator, 5, 2.25, scale.item<double>());
      if (step == 3) scale.fill_(second);  // as a loss scaler does, in place
    }
    return allocator.state().at("averages");
  };
  EXPECT_TRUE(averages(1, 1).equal(averages(65536, 1024))) << "powers of two: to the bit";
  RunningBitAllocator allocator;
  EXPECT_THROW(allocator.set_gradient_scale(at::ones({2})), Error);
}

TEST(ShareMaps, AreRestoredAtEveryStageOfAShareOut) {
  for (int stop = 0; stop < 8; ++stop) {
    RunningBitAllocator whole({4, 5});
    std::unique_ptr<RunningBitAllocator> resumed;
    for (int step = 0; step < 16; ++step) {
      for (RunningBitAllocator* allocator : {&whole, resumed.get()}) {
        if (allocator == nullptr) continue;
        allocator->set_samples(std::vector<int64_t>{3, 0, 2, 1});
        run(*allocator, step < 6 ? 100 : 0.01, 2.25);
      }
      if (step == stop) {
        resumed = std::make_unique<RunningBitAllocator>(BitAllocatorOptions{4, 5});
        resumed->restore(whole.state(), at::kCPU);
      }
      if (resumed == nullptr) continue;
      const auto a = whole.state(), b = resumed->state();
      ASSERT_EQ(a.size(), b.size());
      for (const auto& [name, tensor] : a) EXPECT_TRUE(tensor.equal(b.at(name))) << name << " at " << step << " from " << stop;
      EXPECT_EQ(whole.wants_gradient(0), resumed->wants_gradient(0));
    }
    EXPECT_EQ(whole.mean_bits(), resumed->mean_bits());
  }
}

TEST(ShareMaps, RestoresNothingElse) {
  RunningBitAllocator allocator({4, 1});
  run(allocator, 2);
  const auto good = allocator.state();
  const auto refused = [&](const std::string& name, const at::Tensor& tensor) {
    auto state = good;
    if (tensor.defined()) {
      state[name] = tensor;
    } else {
      state.erase(name);
    }
    RunningBitAllocator other;
    EXPECT_THROW(other.restore(state, at::kCPU), Error) << name;
  };
  for (const char* name : {"names", "layers", "counters", "pieces"}) refused(name, {});
  refused("layers", at::ones({1, 4}, at::kDouble));
  refused("layers", at::full({2, 4}, 9.0, at::kDouble));
  refused("names", at::ones({3}));
  refused("means", at::ones({5}, at::kDouble));
  refused("means", at::zeros({2}, at::kDouble));
  refused("pieces", at::full({1, 4}, 1000, at::kLong));
  refused("averages", at::ones({7, 4}, at::kBFloat16));
}

/// The gradient of a convolution's weight behind norm → ReLU, half of whose samples have 3 bits; or of a residual sum's.
at::Tensor weight_gradient(const std::string& method, bool sum, uint64_t seed, int64_t* bytes = nullptr) {
  at::manual_seed(1);
  const at::Tensor x = at::randn({8, 16, 4, 4}).requires_grad_(), skip = at::randn({8, 16, 4, 4}),
                   w = at::randn({8, 16, 3, 3}).requires_grad_();
  const at::Tensor gamma = at::rand({16}).add_(0.5).requires_grad_(), beta = at::randn({16}).mul_(0.3).requires_grad_();
  const at::Tensor g = at::randn({8, 8, 4, 4});
  const auto allocator = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{8, 1});
  const SavePolicy saving{parse_method(method), "map", allocator};
  const NormWeights norm{gamma, beta, {}, {}};
  at::manual_seed(seed);
  const at::Tensor z = sum ? norm_add_act(x, norm, skip, {}, saving) : norm_act(x, norm, {}, saving);
  const at::Tensor y = conv(z, w, {}, {.padding = {1}}, saving);
  if (bytes != nullptr) *bytes = total_bytes(saved_tensors(y));
  y.mul(g).sum().backward();
  return w.grad().flatten().to(at::kDouble);
}

TEST(ShareMaps, GradientsAreRightOnAverage) {
  constexpr int kSeeds = 100;
  for (const bool sum : {false, true}) {
    const at::Tensor exact = weight_gradient("fp32", sum, 0);
    at::Tensor total = at::zeros_like(exact), squares = at::zeros_like(exact);
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      const at::Tensor off = weight_gradient("satchel,mean=2.5", sum, seed) - exact;
      total += off;
      squares += off.square();
    }
    const at::Tensor mean = total / kSeeds, variance = (squares / kSeeds - mean.square()) / (kSeeds - 1);
    // The mean of 1152 squared t-values of 99 degrees of freedom: 99/97 = 1.02, with a deviation of √(2·1.04/1152) = .042 were they
    // independent; those of one input channel are not: of 16 · 3 · 3 that are it is .12, and 1.5 is 4 of them above.
    EXPECT_LT((mean.square() / variance).mean().item<double>(), 1.5) << sum;
    EXPECT_GT(variance.min().item<double>(), 0) << "they are noisy at all";
    int64_t two = 0, some = 0, three = 0;
    weight_gradient("satchel,mean=2", sum, 0, &two);
    weight_gradient("satchel,mean=2.5", sum, 0, &some);
    weight_gradient("satchel,mean=3", sum, 0, &three);
    // 4 of 8 samples of 256 values: a bit each, and 4 bytes for each of 8; then a bit for all, and no off plane beside a norm's codes,
    // whose 8 blocks are one group of 16 + 256 / 8 bytes.
    EXPECT_EQ(some, two + 4 * 256 / 8 + 8 * 4);
    EXPECT_EQ(three, two + 8 * 256 / 8 - (sum ? 0 : 16 + 256 / 8));
  }
}

}  // namespace
}  // namespace satchel
