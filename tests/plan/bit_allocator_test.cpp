// Bits by layer and by sample over the steps of a run: never above the budget, better than equal bits, and a save that obeys.
#include "satchel/plan/bit_allocator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "satchel/autograd/host_offload.h"
#include "satchel/autograd/saved.h"
#include "satchel/core/allocate.h"
#include "satchel/core/error.h"
#include "satchel/core/per_sample.h"
#include "tests/keep_support.h"

namespace satchel {
namespace {

SavePolicy actnn(const std::string& name, std::shared_ptr<BitAllocator> allocator = {}) {
  SavePolicy saving;
  saving.method = parse_method("actnn");
  saving.name = name;
  saving.allocator = std::move(allocator);
  return saving;
}

/// A layer's save in forward, and its gradient in backward.
struct Step {
  Saved save;
  int64_t bytes = 0;
};
Step saved(const at::Tensor& x, const SavePolicy& saving, bool norm = false) {
  Step s{norm ? Saved(x, saving, test::norm_keep(saving.method, x.size(1))) : Saved(x, saving), 0};
  std::vector<SavedTensor> lines;
  s.save.report(saving.name, norm ? "norm" : "input", lines);
  s.bytes = lines.front().bytes;
  return s;
}

double mean_of(const RunningBitAllocator& allocator, const std::string& name) {
  for (const LayerBits& l : allocator.layers()) {
    if (l.name == name) return l.mean_bits;
  }
  return 0;
}

TEST(ShareOutLayers, NeverExceedsTheBudgetAndPredictsLess) {
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal;
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<LayerNeed> layers(1 + random() % 30);
    double equal = 0;
    for (LayerNeed& l : layers) {
      l.values = 1 + static_cast<int64_t>(random() % 100000);
      l.sensitivity.resize(random() % 40);
      const double scale = std::exp(3 * normal(random));
      for (double& c : l.sensitivity) c = scale * std::exp(normal(random));
      for (const double c : l.sensitivity) equal += c / 9;
    }
    const std::vector<double> means = allocate_layers(layers);
    double spent = 0, budget = 0, predicted = 0;
    for (size_t l = 0; l < layers.size(); ++l) {
      const auto n = static_cast<double>(layers[l].sensitivity.size());
      EXPECT_GE(means[l], 1);
      EXPECT_LE(means[l], 8);
      if (n == 0) {
        EXPECT_EQ(means[l], 2);
        continue;
      }
      spent += static_cast<double>(layers[l].values) * n * means[l];
      budget += static_cast<double>(layers[l].values) * n * 2;
      const std::vector<int64_t> ones(layers[l].sensitivity.size(), 1);
      predicted += allocate_bits(layers[l].sensitivity, ones, per_sample_budget(static_cast<int64_t>(n), means[l])).predicted;
    }
    // Sums of at most 30 doubles: 30 roundings.
    EXPECT_LE(spent, budget * (1 + 30 * 0x1p-53));
    if (layers.size() > 3) {
      EXPECT_LT(predicted, equal);
    }
  }
}

TEST(ShareOutLayers, SensitiveLayersGetMore) {
  const std::vector<double> means = allocate_layers({{100, 2, {1, 1}}, {100, 2, {1e4, 1e4}}, {100, 2, {}}, {0, 2, {5}}});
  // 10^4·gain(2) = 907 > gain(1) = 8/9 > 0: the second takes the bit that each of the first two can spare.
  EXPECT_EQ(means, (std::vector<double>{1, 3, 2, 2}));
  // Numbers that are no sensitivities count for nothing, and crash nothing.
  EXPECT_NO_THROW(allocate_layers({{100, 2, {NAN, INFINITY, -1}}, {7, 2, {1}}}));
}

TEST(RunningBitAllocator, StartsWithTheMeanAndThenFollowsTheGradients) {
  at::manual_seed(1);
  const auto allocator = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{0, 1});
  const at::Tensor x = at::randn({8, 4, 16, 16}), quiet = at::randn({8, 4}) * 1e-3, loud = at::randn({8, 4}) * 1e3;
  for (int step = 0; step < 8; ++step) {
    const Step a = saved(x, actnn("a", allocator)), n = saved(x, actnn("n", allocator), /*norm=*/true), b = saved(x, actnn("b", allocator));
    const int64_t plain = saved(x, actnn("plain")).bytes;
    if (step < 3) {  // seen, copied, worked on
      EXPECT_EQ(a.bytes, plain);
      EXPECT_EQ(b.bytes, plain);
    } else {
      EXPECT_LT(a.bytes, plain);
      EXPECT_EQ(n.bytes, a.bytes);  // a norm takes the bits of the layer before it
      EXPECT_GT(b.bytes, plain);
      EXPECT_LE(a.bytes + n.bytes + b.bytes, 3 * plain);
    }
    b.save.gradient_seen(loud);
    a.save.gradient_seen(quiet);
    n.save.gradient_seen(loud);  // norms have no say
    allocator->step();
    EXPECT_LE(allocator->mean_bits(), 2);
  }
  EXPECT_EQ(mean_of(*allocator, "a"), 1);
  // a and its norm leave a bit each for b's values, which are half as many.
  EXPECT_EQ(mean_of(*allocator, "b"), 4);
}

TEST(RunningBitAllocator, SharesOutEverySoManySteps) {
  const auto allocator = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{0, 4});
  EXPECT_THROW(RunningBitAllocator({0, 0}), Error);
  EXPECT_THROW(RunningBitAllocator({-1, 1}), Error);
  const at::Tensor x = at::randn({4, 64});
  std::vector<bool> wanted;
  for (int step = 0; step < 10; ++step) {
    const Saved save(x, actnn("a", allocator));
    wanted.push_back(allocator->wants_gradient(0));
    save.gradient_seen(at::ones({4, 3}));
    allocator->step();
  }
  // Seen at 0, obeyed after 2; then after 6, so seen at 4; then at 8.
  EXPECT_EQ(wanted, (std::vector<bool>{true, false, false, false, true, false, false, false, true, false}));
}

TEST(RunningBitAllocator, RemembersSamplesByTheirNumbers) {
  const auto allocator = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{10, 100});
  const at::Tensor x = at::randn({1, 256}).expand({4, 256}).contiguous();
  const auto weights = [&](std::vector<int64_t> numbers, const at::Tensor& g) {
    allocator->set_samples(numbers);
    const at::Tensor w = allocator->input("a", 4, 256, 2, at::kCPU).weights;
    const Saved save(x, actnn("a", allocator));
    if (g.defined()) save.gradient_seen(g);
    allocator->step();
    return w;
  };
  EXPECT_FALSE(weights({0, 1, 2, 3}, at::tensor({1.f, 2.f, 4.f, 8.f}).view({4, 1})).defined());
  // Squares 1, 4, 16, 64; sample 9 is new: the mean of those seen in this batch, 28.
  EXPECT_TRUE(weights({3, 1, 9, 2}, at::tensor({0.f, 2.f, 1.f, 4.f}).view({4, 1})).equal(at::tensor({64.f, 4.f, 28.f, 16.f})));
  // The mean with factor ½ of 64 and 0; of 16 and 16; what is new comes as it is; beyond the 10 told, room is made.
  EXPECT_TRUE(weights({3, 2, 9, 20}, {}).equal(at::tensor({32.f, 16.f, 1.f, 49.f / 3})));
  // A gradient that is not finite leaves what was.
  weights({3, 2, 9, 20}, at::tensor({INFINITY, 4.f, NAN, 3.f}).view({4, 1}));
  EXPECT_TRUE(weights({3, 2, 9, 20}, {}).equal(at::tensor({32.f, 16.f, 1.f, 9.f})));
  // Batches of another size than the numbers count alike.
  allocator->set_samples(std::vector<int64_t>{1, 2});
  EXPECT_FALSE(allocator->input("a", 4, 256, 2, at::kCPU).weights.defined());
  EXPECT_THROW(allocator->set_samples(std::vector<int64_t>{-1}), Error);
}

TEST(RunningBitAllocator, AnOverflowChangesNothing) {
  const auto allocator = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{0, 3});
  const at::Tensor x = at::randn({4, 512});
  for (int step = 0; step < 12; ++step) {
    const Saved a(x, actnn("a", allocator)), b(x * 100, actnn("b", allocator));
    // Steps 0 and 3 are looked at; what was seen in 3 is thrown away in 4, so 5 is looked at.
    EXPECT_EQ(allocator->wants_gradient(0), step == 0 || step == 3 || step == 5 || step == 8 || step == 11) << step;
    b.gradient_seen(at::full({4, 2}, step == 3 ? INFINITY : 1.0f));
    a.gradient_seen(at::ones({4, 2}));
    allocator->step();
    EXPECT_EQ(mean_of(*allocator, "a"), step < 2 ? 2 : 1) << step;
    EXPECT_EQ(mean_of(*allocator, "b"), step < 2 ? 2 : 3) << step;
  }
}

TEST(Saved, GivesBackWhatItTook) {
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    const at::Tensor x = at::randn({5, 6, 7, 9}).contiguous(format);
    SavePolicy saving = actnn("a");
    saving.method.swap = true;  // bytes on the CPU stay
    const Saved save(x, saving);
    save.fetch();
    const at::Tensor y = save.restore();
    EXPECT_EQ(y.strides(), x.strides());
    EXPECT_TRUE(save.samples(1, 4).equal(y.narrow(0, 1, 3)));
    EXPECT_EQ(save.shape(), x.sizes().vec());
    std::vector<SavedTensor> lines;
    save.report("a", "input", lines);
    ASSERT_EQ(lines.size(), 1u);
    // 378 values a sample: 48 bytes a bit, 10 bits in all, 2 headers of 4 bytes and a share of 4 bytes each.
    EXPECT_EQ(lines[0], (SavedTensor{"a", "input", {5, 6, 7, 9}, 2, 48 * 10 + 5 * 2 * 4 + 5 * 4, 5 * 378 * 4}));
  }
}

TEST(Saved, KeepsWhatCannotBeSharedOut) {
  SavePolicy saving = actnn("a");
  EXPECT_EQ(Saved(at::empty({0, 3, 4, 4}), saving).restore().sizes(), (std::vector<int64_t>{0, 3, 4, 4}));
  saving.method.input.bits = kKeep;
  const at::Tensor x = at::randn({3, 5});
  EXPECT_TRUE(Saved(x, saving).restore().equal(x));
  saving = actnn("a");
  saving.method.input.block = kRow;
  EXPECT_THROW(Saved(x, saving), Error);
  EXPECT_FALSE(Saved().defined());
}

TEST(Swap, TakesOneLineOfBytes) {
  EXPECT_THROW(HostOffload(at::zeros({4})), Error);
  EXPECT_THROW(HostOffload(at::Tensor()), Error);
  const at::Tensor bytes = at::arange(100, at::kByte);
  const HostOffload offloaded(bytes);
  EXPECT_TRUE(offloaded.bytes().is_same(bytes));
  EXPECT_EQ(offloaded.size(), 100);
  EXPECT_EQ(offloaded.on_device(), 100);
}

}  // namespace
}  // namespace satchel
