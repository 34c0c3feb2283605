// What convolutions and linear layers promise beside the shared gradient test, and their modules beside torch's.
#include "satchel/nn/conv.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/report.h"
#include "satchel/core/error.h"
#include "satchel/nn/linear.h"
#include "satchel/train/memory.h"
#include "tests/autograd/gradient.h"
#include "tests/support.h"
#include "tests/torch_support.h"

namespace satchel::test {
namespace {

using torch::nn::Conv2dOptions;

SavePolicy with(const std::string& method) { return {parse_method(method), "layer", {}}; }
/// Bytes that a second convolution of `other` keeps after one of x.
int64_t second_bytes(const std::function<at::Tensor(const at::Tensor&)>& other, const std::string& method, const std::string& second = "") {
  at::manual_seed(1);
  const at::Tensor x = leaf({4, 8, 6, 6}) * 1, w = leaf({4, 8, 1, 1});
  const at::Tensor a = conv(x, w, {}, {}, with(method));
  const at::Tensor b = conv(other(x), w, {}, {}, with(second.empty() ? method : second));
  return total_bytes(saved_tensors(at::cat({a, b}))) - total_bytes(saved_tensors(a));
}

TEST(ConvSaves, AreOneForAllThatReadTheSameTensor) {
  for (const char* method : {"actnn,adaptive=no", "actnn", "division", "satchel", "bits=4,block=64"}) {
    EXPECT_EQ(second_bytes([](const at::Tensor& x) { return x; }, method), 0) << method;
    const int64_t own = second_bytes([](const at::Tensor& x) { return x * 2; }, method);
    EXPECT_GE(own, 4 * 8 * 36 / 4) << method;                                                                   // 2 bits a value at least
    EXPECT_EQ(second_bytes([](const at::Tensor& x) { return x.detach().add_(1), x; }, method), own) << method;  // other values
    EXPECT_EQ(second_bytes([](const at::Tensor& x) { return x.narrow(0, 0, 4); }, method), own) << method;
  }
  EXPECT_GT(second_bytes([](const at::Tensor& x) { return x; }, "actnn,adaptive=no", "actnn,adaptive=no,bits=4"), 0);
}

TEST(ConvSaves, OutliveTheirMakersGraph) {
  const at::Tensor x = leaf({4, 8, 6, 6}), w = leaf({4, 8, 1, 1});
  at::Tensor a = conv(x, w, {}, {}, with("actnn,adaptive=no"));
  const at::Tensor b = conv(x, w, {}, {}, with("actnn,adaptive=no"));
  a.reset();
  EXPECT_GT(total_bytes(saved_tensors(b)), 0);
  EXPECT_TRUE(gradients_of(b, at::ones_like(b), {w})[0].isfinite().all().item<bool>());
}

TEST(ConvSaves, FrozenWeightKeepsNoInput) {
  const at::Tensor x = leaf({2, 4, 6, 6}), w = at::randn({3, 4, 3, 3});
  const at::Tensor out = conv(x, w), g = at::randn_like(out);
  EXPECT_EQ(total_bytes(saved_tensors(out)), 0);
  const at::Tensor want = gradients_of(at::conv2d(x, w), g, {x})[0];
  EXPECT_TRUE(at::allclose(gradients_of(out, g, {x})[0], want, 1e-4, 1e-5));
}

TEST(ConvSaves, ChangedWeightIsAnErrorAsInTorch) {
  const at::Tensor x = leaf({2, 4, 6, 6}), w = leaf({3, 4, 3, 3});
  const at::Tensor out = conv(x, w);
  w.detach().add_(1);
  EXPECT_ANY_THROW(gradients_of(out, at::ones_like(out), {x}));
}

/// More samples than are decoded at a time: 2^21 values.
TEST(ConvSaves, AreDecodedAStretchOfSamplesAtATime) {
  at::manual_seed(6);
  const at::Tensor x = leaf({70, 8, 65, 63}), w = leaf({4, 8, 3, 3});  // 2.29 million values: odd maps start at samples 0, 40
  for (const char* method : {"satchel,bits=32", "exact,bits=32,project=none"}) {
    const at::Tensor z = relu(x, with(method)), out = conv(z, w, {}, {{2}}, with(method)), g = at::randn_like(out);
    const auto want = gradients_of(at::conv2d(at::relu(x), w, {}, 2), g, {x, w}), got = gradients_of(out, g, {x, w});
    // Sums of 70·32·31 terms of order 1 in another order: √69440·2^−24 of their size √69440 each, twenty times over.
    EXPECT_LE((got[1] - want[1]).abs().max().item<double>(), 20 * 69440 * 0x1p-24) << method;
    EXPECT_TRUE(at::allclose(got[0], want[0], 1e-4, 1e-4)) << method;
    MemoryMeter meter(at::kCPU);
    InputSave save(x.detach(), with("actnn,adaptive=no"), {Reads::samples, {}, 1});
    const int64_t kept = meter.allocated();
    meter.reset_peak();
    save.for_samples(at::kFloat, [&](int64_t first, int64_t last, const at::Tensor& part) { EXPECT_EQ(part.size(0), last - first); });
    EXPECT_LT(meter.peak() - kept, 2 * (int64_t{2} << 20) * 4);  // a stretch of 2^21 floats, decoded and in order
  }
}

TEST(Conv, AnyOrderOfMemoryGivesTheSameAndComesOutChannelsLast) {
  at::manual_seed(4);
  const at::Tensor x = at::randn({3, 8, 6, 5}), w = leaf({4, 8, 3, 3}), g = at::randn({3, 4, 4, 3});
  const at::Tensor forms[] = {x, x.contiguous(at::MemoryFormat::ChannelsLast), x.transpose(2, 3).contiguous().transpose(2, 3),
                              at::stack({x, x}, 1).select(1, 1)};
  std::vector<std::vector<at::Tensor>> gradients;
  for (const at::Tensor& form : forms) {
    at::manual_seed(5);
    const at::Tensor in = form.detach().requires_grad_();
    const at::Tensor out = conv(in, w);
    EXPECT_TRUE(out.is_contiguous(at::MemoryFormat::ChannelsLast));
    gradients.push_back(gradients_of(out, g, {in, w}));
    for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(gradients.back()[i], gradients[0][i])) << i;
  }
}

TEST(Conv, EmptyBatchGivesNothingAndNoGradient) {
  for (const char* method : {"satchel", "actnn", "division", "fp32"}) {
    const at::Tensor x = leaf({0, 4, 6, 6}), w = leaf({3, 4, 3, 3}), b = leaf({3});
    const at::Tensor out = conv(x, w, b, {}, with(method));
    EXPECT_EQ(out.sizes(), at::IntArrayRef({0, 3, 4, 4})) << method;
    const auto got = gradients_of(out, at::ones_like(out), {x, w, b});
    EXPECT_EQ(got[0].sizes(), x.sizes()) << method;
    EXPECT_TRUE(at::equal(got[1], at::zeros_like(w)) && at::equal(got[2], at::zeros_like(b))) << method;
  }
}

TEST(Conv, OneSampleWithoutABatch) {
  const at::Tensor x = leaf({4, 6, 6}), w = leaf({3, 4, 3, 3});
  const at::Tensor out = conv(x, w, {}, {}, with("satchel,bits=32"));
  EXPECT_TRUE(at::allclose(out, at::conv2d(x, w), 1e-4, 1e-5));
}

TEST(Conv, NonFiniteValuesAreNotHidden) {
  for (const char* method : {"satchel", "actnn", "division"}) {
    at::Tensor x = at::randn({3, 4, 6, 6});
    x[1][2][3][3] = std::numeric_limits<float>::infinity();
    const at::Tensor w = leaf({3, 4, 3, 3}), out = conv(x, w, {}, {}, with(method));
    EXPECT_FALSE(out.isfinite().all().item<bool>()) << method;
    EXPECT_TRUE(gradients_of(out, at::ones_like(out), {w})[0].isnan().any().item<bool>()) << method;
  }
}

struct Autocast {
  explicit Autocast(at::ScalarType type) {
    at::autocast::set_autocast_dtype(at::kCPU, type);
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  ~Autocast() { at::autocast::set_autocast_enabled(at::kCPU, false); }
};

TEST(Autocast, CastsAsTorchDoesAndGradientsHaveTheirOwnTypes) {
  at::manual_seed(3);
  const at::Tensor x = leaf({4, 8, 6, 6}), w = leaf({4, 8, 3, 3}), b = leaf({4}), rows = leaf({10, 12}), v = leaf({5, 12});
  const auto run = [&](bool ours, const std::string& method) {
    const Autocast on(at::kBFloat16);
    const at::Tensor y = ours ? conv(x, w, b, {}, with(method)) : at::conv2d(x, w, b);
    const at::Tensor z = ours ? satchel::linear(rows, v, {}, with(method)) : at::linear(rows, v);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_EQ(z.scalar_type(), at::kBFloat16);
    return at::cat({y.flatten(), z.flatten()});
  };
  const at::Tensor want_out = run(false, ""), g = at::randn_like(want_out);
  const auto want = gradients_of(want_out, g, {x, w, b, rows, v});
  for (const char* method : {"satchel,bits=32", "exact,bits=32,project=none", "fp32"}) {
    const at::Tensor out = run(true, method);
    const auto got = gradients_of(out, g, {x, w, b, rows, v});
    // torch rounds products and its gradients to bfloat16, 2^−8 relatively, each of the two at most four times on the way.
    const auto close = [&](const at::Tensor& a, const at::Tensor& e) {
      EXPECT_LE((a.to(at::kFloat) - e.to(at::kFloat)).norm().item<double>(), 8 * 0x1p-8 * e.to(at::kFloat).norm().item<double>()) << method;
    };
    close(out, want_out);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].scalar_type(), at::kFloat) << method << i;
      close(got[i], want[i]);
    }
  }
}

TEST(Autocast, AnInfinityReachesTheGradients) {
  const at::Tensor x = leaf({2, 4, 5, 5}), w = leaf({3, 4, 3, 3});
  const Autocast on(at::kHalf);
  const at::Tensor out = conv(x * 70000, w);  // beyond float16
  EXPECT_FALSE(gradients_of(out, at::ones_like(out), {w})[0].isfinite().all().item<bool>());
}

/// A module of ours, torch's with the same parameters, and what both are given.
template <class Ours, class Torchs, class Options>
void expect_as_torch(const Options& options, at::IntArrayRef shape, const std::string& what) {
  at::manual_seed(11);
  Torchs theirs(options);
  at::manual_seed(11);
  Ours ours(options, with("satchel,bits=32"));
  std::vector<std::string> names;
  for (const auto& p : theirs->named_parameters()) names.push_back(p.key());
  const auto parameters = ours->named_parameters();
  ASSERT_EQ(parameters.keys(), names) << what;
  Inputs in{leaf(shape)}, own{in[0].detach().requires_grad_()};
  for (const auto& p : theirs->named_parameters()) {
    EXPECT_TRUE(at::equal(p.value(), parameters[p.key()])) << what << ": " << p.key();  // initial values
    in.push_back(p.value());
    own.push_back(parameters[p.key()]);
  }
  const at::Tensor want = theirs->forward(in[0]), got = ours->forward(own[0]);
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  EXPECT_TRUE(at::allclose(got, want, 1e-4, 1e-5)) << what;
  const at::Tensor g = at::randn_like(want);
  const auto wanted = gradients_of(want, g, in), gradients = gradients_of(got, g, own);
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::allclose(gradients[i], wanted[i], 1e-3, 1e-4)) << what << i;
  const auto copy = std::dynamic_pointer_cast<typename Ours::Impl>(ours->clone());
  ASSERT_NE(copy, nullptr) << what;
  EXPECT_EQ(copy->saving.method, ours->saving.method) << what;
  EXPECT_TRUE(at::equal(copy->forward(own[0]), got)) << what;
  torch::nn::Sequential list(ours);
  EXPECT_TRUE(at::equal(list->forward(own[0]), got)) << what;
}

TEST(ConvModules, EqualTorchsWithTheSameOptions) {
  using namespace torch::nn;
  expect_as_torch<nn::Conv1d, torch::nn::Conv1d>(Conv1dOptions(4, 6, 3).stride(2).padding(1), {3, 4, 9}, "conv1d");
  expect_as_torch<nn::Conv2d, torch::nn::Conv2d>(Conv2dOptions(4, 6, {3, 2}).groups(2).bias(false), {3, 4, 7, 6}, "conv2d");
  expect_as_torch<nn::Conv2d, torch::nn::Conv2d>(Conv2dOptions(4, 6, 3).padding(1), {4, 7, 6}, "conv2d, one sample");
  expect_as_torch<nn::Conv3d, torch::nn::Conv3d>(Conv3dOptions(2, 3, 2).dilation(2), {2, 2, 5, 6, 4}, "conv3d");
  expect_as_torch<nn::Linear, torch::nn::Linear>(LinearOptions(7, 5), {4, 3, 7}, "linear");
  expect_as_torch<nn::Linear, torch::nn::Linear>(LinearOptions(7, 5).bias(false), {4, 7}, "linear without a bias");
}

TEST(ConvModules, PadAsTorchDoes) {
  using namespace torch::nn;
  const Conv2dOptions base = Conv2dOptions(4, 6, {3, 2}).padding({2, 1});
  expect_as_torch<nn::Conv2d, torch::nn::Conv2d>(Conv2dOptions(base).padding_mode(torch::kReflect), {3, 4, 7, 6}, "reflect");
  expect_as_torch<nn::Conv2d, torch::nn::Conv2d>(Conv2dOptions(base).padding_mode(torch::kReplicate), {3, 4, 7, 6}, "replicate");
  expect_as_torch<nn::Conv2d, torch::nn::Conv2d>(Conv2dOptions(base).padding_mode(torch::kCircular), {3, 4, 7, 6}, "circular");
  expect_as_torch<nn::Conv2d, torch::nn::Conv2d>(Conv2dOptions(base).padding(torch::kSame), {3, 4, 7, 6}, "same");
  expect_as_torch<nn::Conv2d, torch::nn::Conv2d>(Conv2dOptions(base).padding(torch::kValid), {3, 4, 7, 6}, "valid");
  expect_as_torch<nn::Conv1d, torch::nn::Conv1d>(Conv1dOptions(4, 6, 4).padding(torch::kSame).padding_mode(torch::kReflect), {3, 4, 9},
                                                 "same, reflect");
}

TEST(ConvModules, TransposedEqualTorchs) {
  using namespace torch::nn;
  expect_as_torch<nn::ConvTranspose1d, torch::nn::ConvTranspose1d>(ConvTranspose1dOptions(4, 6, 3).stride(2), {3, 4, 5}, "transposed 1d");
  expect_as_torch<nn::ConvTranspose2d, torch::nn::ConvTranspose2d>(
      ConvTranspose2dOptions(4, 6, 3).stride(2).padding(1).output_padding(1).groups(2), {3, 4, 5, 4}, "transposed 2d");
  expect_as_torch<nn::ConvTranspose3d, torch::nn::ConvTranspose3d>(ConvTranspose3dOptions(2, 3, 2).bias(false), {2, 2, 3, 4, 3},
                                                                   "transposed 3d");
  nn::ConvTranspose2d module(ConvTranspose2dOptions(4, 6, 3).stride(2));
  EXPECT_EQ(module->forward(at::randn({2, 4, 5, 5}), at::IntArrayRef({12, 11})).sizes(), at::IntArrayRef({2, 6, 12, 11}));
  EXPECT_THROW(module->forward(at::randn({2, 4, 5, 5}), at::IntArrayRef({13, 11})), Error);
}

TEST(ConvModules, SayWhatTheyAre) {
  std::ostringstream text;
  text << nn::Conv2d(Conv2dOptions(4, 6, 3), with("actnn")) << nn::ConvTranspose1d(torch::nn::ConvTranspose1dOptions(4, 6, 3), with("fp32"))
       << nn::Linear(torch::nn::LinearOptions(4, 6), with("satchel"));
  for (const char* part :
       {"satchel::nn::Conv2d(4, 6", "method=actnn)", "satchel::nn::ConvTranspose1d(4, 6", "satchel::nn::Linear(in_features=4"}) {
    EXPECT_NE(text.str().find(part), std::string::npos) << text.str();
  }
}

TEST(ConvRefuses, WhatDoesNotFit) {
  const at::Tensor x = leaf({2, 4, 6, 6}), w = leaf({3, 4, 3, 3});
  EXPECT_EQ(error_of([&] { conv(at::randn({2, 5, 6, 6}), w); }), "[conv] input must have 4 channels, got 5");
  EXPECT_EQ(error_of([&] { conv(at::randn({4, 6}), w); }), "[conv] input must have 4 dimensions, or one less, got 2");
  EXPECT_EQ(error_of([&] { conv(x, leaf({3, 4})); }), "[conv] weight must have 3 to 5 dimensions, got 2");
  EXPECT_EQ(error_of([&] { conv(x, w, {}, {{1, 1, 1}}); }), "[conv] stride must have 1 number or 2, got 3");
  EXPECT_EQ(error_of([&] { conv(x, w, {}, {{0}}); }), "[conv] stride must be at least 1, got 0");
  EXPECT_EQ(error_of([&] { conv(x, w, {}, {{1}, {-1}}); }), "[conv] padding must be at least 0, got -1");
  EXPECT_EQ(error_of([&] { conv(x, w, leaf({4})); }), "[conv] bias must be a line of 3, got 4");
  EXPECT_EQ(error_of([&] { conv(x, w, {}, {{1}, {0}, {1}, {0}, false, 0}); }), "[conv] groups must be at least 1, got 0");
  EXPECT_NE(error_of([&] { conv(x.to(at::kDouble), w.to(at::kDouble)); }).find("[conv] tensor must be float32"), std::string::npos);
  EXPECT_NE(error_of([&] { conv({}, w); }).find("[conv]"), std::string::npos);
  EXPECT_ANY_THROW(conv(leaf({2, 4, 2, 2}), w));  // torch says that the kernel is larger than the map
  EXPECT_EQ(error_of([] { nn::Linear(torch::nn::LinearOptions(0, 3)); }), "[linear] in_features must be at least 1, got 0");
}

}  // namespace
}  // namespace satchel::test
