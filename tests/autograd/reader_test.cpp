// What single functions promise their readers: outputs of their own, bits enough, values as they are now, and errors that blame the input.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/norm.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/pool.h"
#include "satchel/autograd/report.h"
#include "satchel/core/error.h"
#include "tests/autograd/gradient.h"
#include "tests/torch_support.h"

namespace satchel::test {
namespace {

TEST(Outputs, AreNoViews) {
  for (const GradientCase& c : all_cases()) {
    for (const std::string& method : c.noisy_methods) {
      at::manual_seed(7);
      EXPECT_FALSE(c.ours(c.inputs(), saving_of(method)).is_view()) << c.name << ", " << method;
    }
  }
}

TEST(Outputs, OfALinearLayerMayChangeInPlace) {
  const SavePolicy exact = saving_of("satchel,bits=32");
  for (const bool ours : {false, true}) {
    at::manual_seed(3);
    const at::Tensor x = leaf({2, 5, 8}), w = leaf({8, 8}), b = leaf({8});
    at::Tensor y = satchel::linear(x, w, b, exact);
    EXPECT_FALSE(y.is_view());
    if (ours) {
      y += x;
    } else {
      const at::NoGradGuard no_grad;
      y += 1;  // a change that autograd does not see leaves the layer in the graph
    }
    const at::Tensor g = at::randn(y.sizes());
    const at::Tensor want = at::matmul(g, w) + (ours ? g : at::zeros_like(g));
    EXPECT_TRUE(at::allclose(gradients_of(y, g, {x})[0], want, 1e-5, 1e-5)) << ours;
  }
}

/// The largest error of a weight gradient over the gradient's largest value, worst of 3 seeds.
double error_of(const std::function<at::Tensor(const at::Tensor& w)>& ours, const at::Tensor& w, const at::Tensor& want,
                const at::Tensor& g) {
  double worst = 0;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    at::manual_seed(seed);
    const at::Tensor got = gradients_of(ours(w), g, {w})[0];
    worst = std::max(worst, ((got - want).abs().max() / want.abs().max()).item<double>());
  }
  return worst;
}

TEST(Readers, WithMoreBitsThanTheMakerPackTheirOwn) {
  at::manual_seed(4);
  const SavePolicy few = saving_of("satchel"), many = saving_of("satchel,bits=8,side=none");
  const at::Tensor x = leaf({256, 32}), w = leaf({8, 32}), g = at::randn({256, 8});
  const at::Tensor want = gradients_of(at::linear(at::relu(x), w), g, {w})[0];
  const auto through = [&](const SavePolicy& maker, const SavePolicy& reader) {
    return error_of([&](const at::Tensor& weight) { return satchel::linear(relu(x, maker), weight, {}, reader); }, w, want, g);
  };
  // 8 bits of a range of 4 are off by less than 2^−7 each; 256 of them that meet a gradient of order 1 add up as √256, against 256·0.4 in a
  // sum of the largest: 0.01. Two bits are 85 times as coarse.
  EXPECT_LT(through(few, many), 0.01);
  EXPECT_GT(through(few, few), 0.01);
  EXPECT_EQ(packed_tensors(satchel::linear(relu(x, few), w, {}, few)).size(), 1u) << "as many bits: one save for both";
  EXPECT_EQ(
      packed_tensors(satchel::linear(relu(x, saving_of("satchel,bits=4,side=both")), w, {}, saving_of("satchel,bits=4,side=both"))).size(),
      1u)
      << "a ReLU's form has 3 bits at most: the reader's own would have no more";
  NormActOptions options;
  const NormWeights weights{leaf({32}), leaf({32}), {}, {}};
  const size_t shared = packed_tensors(norm_act(x, weights, options, few)).size();
  EXPECT_EQ(packed_tensors(satchel::linear(norm_act(x, weights, options, few), w, {}, few)).size(), shared);
  EXPECT_EQ(packed_tensors(satchel::linear(norm_act(x, weights, options, few), w, {}, many)).size(), shared + 1);
}

TEST(Readers, OfAMaxPoolThatWasChangedTakeItsValuesAsTheyAre) {
  at::manual_seed(5);
  const SavePolicy s = saving_of("satchel");
  const at::Tensor x = leaf({2, 8, 8, 8}), w = leaf({4, 8, 1, 1});
  const at::Tensor first = max_pool(relu(x, s), {.kernel = {2}}, s);
  first.detach().sub_(3);  // no ReLU's output any more: negative, and its gradient unchanged
  const at::Tensor second = max_pool(first, {.kernel = {2}}, s), out = conv(second, w, {}, {}, s);
  const at::Tensor got = gradients_of(out, at::ones_like(out), {w})[0];
  const at::Tensor want = gradients_of(at::conv2d(second.detach(), w), at::ones_like(out), {w})[0];
  // All values lie within 3 of −3: codes of 2 bits over a range below 4 are off by less than 2 each, 8 a sum. The ReLU's form is all 0.
  EXPECT_LE((got - want).abs().max().item<double>(), 16.0);
  EXPECT_LT(got.max().item<double>(), 0.0);
}

/// The same numbers as rows and as images of one pixel are the same problem. An offset of 100 deviations widens the range of x, not of x̂.
TEST(Norms, OfRowsAreAsExactAsOfImages) {
  for (const char* method : {"actnn", "division", "actnn,adaptive=no"}) {
    const SavePolicy s = saving_of(method);
    std::vector<double> errors;
    for (const bool rows : {true, false}) {
      at::manual_seed(6);
      const at::Tensor base = at::randn({64, 32, 4, 4}) + 100 * at::randn({1, 32, 1, 1});
      const at::Tensor x =
          (rows ? base.permute({0, 2, 3, 1}).reshape({1024, 32}).contiguous() : base.contiguous(at::MemoryFormat::ChannelsLast))
              .requires_grad_();
      const NormWeights w{leaf({32}), leaf({32}), {}, {}};
      const at::Tensor g = at::randn(x.sizes());
      const at::Tensor out = batch_norm(x, w, {}, s);
      const at::Tensor got = gradients_of(out, g, {w.gamma})[0];
      const at::Tensor want = gradients_of(at::batch_norm(x, w.gamma, w.beta, {}, {}, true, 0.1, 1e-5, false), g, {w.gamma})[0];
      errors.push_back((got - want).norm().item<double>());
    }
    // Division's low-pass keeps a mean of its own on images: there it may be better, never a hundred times.
    EXPECT_LT(errors[0], 30 * errors[1]) << method;
  }
}

TEST(NonFinite, OneInfinityLeavesItsNeighboursOn) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const char* method : {"satchel", "satchel,bits=3", "satchel,side=none", "satchel,bits=32", "exact"}) {
    at::manual_seed(2);
    at::Tensor x = at::randn({16, 32});
    x[3][5] = kInfinity;
    x[9][1] = -kInfinity;
    x.requires_grad_();
    const at::Tensor g = at::randn({16, 32}), want = gradients_of(at::relu(x), g, {x})[0];
    const at::Tensor out = relu(x, saving_of(method));
    EXPECT_TRUE(at::equal(out, at::relu(x))) << method;
    EXPECT_TRUE(at::equal(gradients_of(out, g, {x})[0], want)) << method;
  }
}

TEST(NonFinite, MinusInfinityIsOffInAReluWithoutANorm) {
  for (const char* method : {"satchel", "satchel,side=none", "exact", "fp32"}) {
    for (const double p : {0.0, 0.5}) {
      at::manual_seed(2);
      at::Tensor x = at::randn({16, 32});
      x[3][5] = -std::numeric_limits<float>::infinity();
      x.requires_grad_();
      NormActOptions options;
      options.norm = Norm::none;
      options.dropout = p;
      const at::Tensor out = norm_act(x, {}, options, saving_of(method));
      EXPECT_FALSE(out.isnan().any().item<bool>()) << method;
      EXPECT_EQ(out[3][5].item<double>(), 0) << method;
      EXPECT_FALSE(gradients_of(out, at::ones_like(out), {x})[0].isnan().any().item<bool>()) << method;
    }
  }
}

/// Sizes at which torch's own oneDNN gets results wrong with AVX-512, where strides say channels_last.
TEST(Conv, OfOneChannelWithAStrideIsRight) {
  const auto in_last = [](const at::Tensor& t) {
    return at::empty_strided(t.sizes(), {t.size(2) * t.size(3), 1, t.size(3), 1}).copy_(t).requires_grad_();
  };
  for (const char* method : {"fp32", "satchel,bits=32"}) {
    for (const int64_t width : {2, 3, 4, 5}) {
      at::manual_seed(9);
      const at::Tensor x = in_last(at::randn({3, 1, 4, width})), w = in_last(at::randn({2, 1, 1, 2}));
      const at::Tensor out = conv(x, w, {}, {.stride = {1, 2}}, saving_of(method));
      const at::Tensor x64 = x.detach().to(at::kDouble).contiguous().requires_grad_(),
                       w64 = w.detach().to(at::kDouble).contiguous().requires_grad_();
      const at::Tensor out64 = at::conv2d(x64, w64, {}, {1, 2}), g = at::randn(out64.sizes());
      EXPECT_TRUE(at::allclose(out.to(at::kDouble), out64, 1e-5, 1e-5)) << method << width;
      const auto got = gradients_of(out, g, {x, w}), want = gradients_of(out64, g.to(at::kDouble), {x64, w64});
      for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::allclose(got[i].to(at::kDouble), want[i], 1e-5, 1e-5)) << method << width << i;
    }
  }
}

/// Sizes at which torch's own oneDNN gets these gradients wrong, or crashes.
TEST(Conv, OfOnePixelWithAStrideHasRightWeightGradients) {
  struct Shape {
    int64_t samples, in, out, size;
  };
  for (const char* method : {"fp32", "satchel,bits=32"}) {
    for (const Shape s : {Shape{16, 3, 3, 28}, {4, 5, 48, 28}, {2, 4, 1, 14}, {3, 2, 32, 32}, {3, 6, 5, 33}}) {
      at::manual_seed(9);
      const at::Tensor x = at::randn({s.samples, s.in, s.size, s.size}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
      const at::Tensor w = at::randn({s.out, s.in, 1, 1}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
      const at::Tensor out = conv(x, w, {}, {.stride = {2}}, saving_of(method));
      const at::Tensor g = at::randn(out.sizes()).contiguous(at::MemoryFormat::ChannelsLast);
      const auto got = gradients_of(out, g, {x, w});
      const at::Tensor x64 = x.detach().to(at::kDouble).contiguous().requires_grad_(),
                       w64 = w.detach().to(at::kDouble).contiguous().requires_grad_();
      const at::Tensor out64 = at::conv2d(x64, w64, {}, 2);
      const auto want = gradients_of(out64, g.to(at::kDouble), {x64, w64});
      // Float32 sums of at most 4,000 terms of order 1, each rounded to 2^−24, that add up to some 60.
      EXPECT_TRUE(at::allclose(out.to(at::kDouble), out64, 1e-4, 1e-4)) << method << s.in;
      for (size_t i = 0; i < 2; ++i)
        EXPECT_TRUE(at::allclose(got[i].to(at::kDouble), want[i], 1e-3, 1e-3)) << method << ' ' << s.in << ' ' << i;
    }
  }
}

std::string message_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& e) {
    return e.what();
  }
  return "nothing was thrown";
}

TEST(Messages, BlameTheInput) {
  const at::Tensor x = leaf({4, 10}), map = leaf({2, 10, 2, 2});
  const NormWeights eight{leaf({8}), leaf({8}), {}, {}};
  EXPECT_EQ(message_of([&] { satchel::linear(x, leaf({3, 8})); }), "[linear] x must have 8 features in its last dimension, got [4, 10]");
  EXPECT_EQ(message_of([&] { satchel::linear(x, leaf({3, 10}), leaf({4})); }), "[linear] bias must be a line of 3, got [4]");
  EXPECT_EQ(message_of([&] { batch_norm(x, eight); }),
            "[batch_norm] x must have 8 channels (dimension 1), as gamma has numbers, got [4, 10]");
  EXPECT_EQ(message_of([&] { layer_norm(x, eight); }),
            "[layer_norm] x must have 8 channels (dimension 1), as gamma has numbers, got [4, 10]");
  EXPECT_EQ(message_of([&] { group_norm(map, 2, eight); }),
            "[group_norm] x must have 8 channels (dimension 1), as gamma has numbers, got [2, 10, 2, 2]");
  EXPECT_EQ(message_of([&] { norm_act(x, eight, {}); }),
            "[norm_act] x must have 8 channels (dimension 1), as gamma has numbers, got [4, 10]");
  EXPECT_EQ(message_of([&] { conv(map, leaf({4, 8, 1, 1}), {}, {}); }), "[conv] input must have 8 channels, got 10");
  EXPECT_EQ(message_of([&] {
              conv(map, leaf({4, 10, 3, 3}), {}, {});
            }),
            "[conv] input must be at least 3 long in spatial dimension 0, got 2");
  EXPECT_EQ(message_of([&] { max_pool(map, {.kernel = {3}}); }), "[max_pool] input must be at least 3 long where the kernel is 3, got 2");
  EXPECT_EQ(message_of([&] { avg_pool(map, {.kernel = {3}}); }), "[avg_pool] input must be at least 3 long where the kernel is 3, got 2");
}

}  // namespace
}  // namespace satchel::test
