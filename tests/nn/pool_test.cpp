// Pools and upsampling as functions and modules: what they keep, what they share, what they refuse.
#include "satchel/nn/pool.h"

#include <gtest/gtest.h>
#include <torch/nn/functional/upsampling.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/upsampling.h>

#include <limits>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/pool.h"
#include "satchel/autograd/report.h"
#include "satchel/autograd/resample.h"
#include "satchel/core/error.h"
#include "satchel/nn/upsample.h"
#include "satchel/train/memory.h"
#include "tests/autograd/gradient.h"
#include "tests/support.h"
#include "tests/torch_support.h"

namespace satchel::test {
namespace {

SavePolicy with(const std::string& method) { return {parse_method(method), "layer", {}}; }
template <class Ours, class Torchs, class Options>
void expect_as_torch(const Options& options, at::IntArrayRef shape, const std::string& what) {
  at::manual_seed(11);
  Torchs theirs(options);
  Ours ours(options, with("satchel"));
  const at::Tensor x = leaf(shape), own = x.detach().requires_grad_();
  const at::Tensor want = theirs->forward(x), got = ours->forward(own);
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  EXPECT_TRUE(at::allclose(got, want, 1e-5, 1e-6)) << what;
  const at::Tensor g = at::randn_like(want);
  EXPECT_TRUE(at::allclose(gradients_of(got, g, {own})[0], gradients_of(want, g, {x})[0], 1e-5, 1e-6)) << what;
  torch::nn::Sequential list(ours);
  EXPECT_TRUE(at::equal(list->forward(own), got)) << what;
  ASSERT_NE(std::dynamic_pointer_cast<typename Ours::Impl>(ours->clone()), nullptr) << what;
  std::ostringstream text;
  text << ours;
  EXPECT_EQ(text.str().rfind("satchel::nn::", 0), 0U) << text.str();
}

TEST(PoolModules, EqualTorchsWithTheSameOptions) {
  using namespace torch::nn;
  expect_as_torch<nn::MaxPool1d, torch::nn::MaxPool1d>(MaxPool1dOptions(3).stride(2), {2, 3, 9}, "max 1d");
  expect_as_torch<nn::MaxPool2d, torch::nn::MaxPool2d>(MaxPool2dOptions({3, 2}).stride(2).padding({1, 0}), {2, 3, 9, 8}, "max 2d");
  expect_as_torch<nn::MaxPool2d, torch::nn::MaxPool2d>(MaxPool2dOptions(3).stride(2).ceil_mode(true), {3, 9, 8}, "max 2d, one sample");
  expect_as_torch<nn::MaxPool3d, torch::nn::MaxPool3d>(MaxPool3dOptions(2).dilation(2), {2, 3, 5, 6, 7}, "max 3d");
  expect_as_torch<nn::AvgPool1d, torch::nn::AvgPool1d>(AvgPool1dOptions(3).stride(2), {2, 3, 9}, "avg 1d");
  expect_as_torch<nn::AvgPool2d, torch::nn::AvgPool2d>(AvgPool2dOptions(3).padding(1).divisor_override(4), {2, 3, 9, 8}, "avg 2d");
  expect_as_torch<nn::AvgPool3d, torch::nn::AvgPool3d>(AvgPool3dOptions(2), {2, 3, 5, 6, 7}, "avg 3d");
  expect_as_torch<nn::AdaptiveAvgPool1d, torch::nn::AdaptiveAvgPool1d>(AdaptiveAvgPool1dOptions(4), {2, 3, 9}, "adaptive 1d");
  expect_as_torch<nn::AdaptiveAvgPool2d, torch::nn::AdaptiveAvgPool2d>(AdaptiveAvgPool2dOptions({3, std::nullopt}), {2, 3, 9, 8},
                                                                       "adaptive 2d");
  expect_as_torch<nn::AdaptiveAvgPool2d, torch::nn::AdaptiveAvgPool2d>(AdaptiveAvgPool2dOptions({1, 1}), {2, 3, 9, 8}, "mean");
  expect_as_torch<nn::AdaptiveAvgPool3d, torch::nn::AdaptiveAvgPool3d>(AdaptiveAvgPool3dOptions({2, 3, 4}), {2, 3, 5, 6, 7}, "adaptive 3d");
}

TEST(PoolModules, UpsampleEqualsTorchs) {
  using torch::nn::UpsampleOptions;
  const std::vector<double> two{2.0}, odd{1.5, 2.5};
  const auto check = [](const UpsampleOptions& options, at::IntArrayRef shape, const std::string& what) {
    expect_as_torch<nn::Upsample, torch::nn::Upsample>(options, shape, what);
  };
  check(UpsampleOptions().scale_factor(two), {2, 3, 5}, "nearest 1d");
  check(UpsampleOptions().scale_factor(odd), {2, 3, 5, 4}, "nearest 2d");
  check(UpsampleOptions().size(std::vector<int64_t>{7, 6, 9}), {2, 3, 5, 4, 3}, "nearest 3d");
  check(UpsampleOptions().scale_factor(two).mode(torch::kLinear).align_corners(true), {2, 3, 5}, "linear");
  check(UpsampleOptions().scale_factor(odd).mode(torch::kBilinear).align_corners(false), {2, 3, 5, 4}, "bilinear");
  check(UpsampleOptions().scale_factor(odd).mode(torch::kBicubic), {2, 3, 5, 4}, "bicubic");
  check(UpsampleOptions().size(std::vector<int64_t>{7, 6, 9}).mode(torch::kTrilinear), {2, 3, 5, 4, 3}, "trilinear");
}

TEST(Upsample, ModesWithoutAModuleEqualTorchs) {
  namespace F = torch::nn::functional;
  const at::Tensor x = at::randn({2, 3, 6, 8});
  EXPECT_TRUE(at::allclose(upsample(x, {{4, 3}, {}, Resample::area}),
                           F::interpolate(x, F::InterpolateFuncOptions().size(std::vector<int64_t>{4, 3}).mode(torch::kArea))));
  EXPECT_TRUE(
      at::equal(upsample(x, {{}, {1.5}, Resample::nearest_exact}),
                F::interpolate(x, F::InterpolateFuncOptions().scale_factor(std::vector<double>{1.5, 1.5}).mode(torch::kNearestExact))));
}

/// What stands after x itself is gone.
int64_t kept_by(const std::function<at::Tensor(const at::Tensor&)>& run, at::IntArrayRef shape) {
  const at::Tensor start = leaf({1});
  MemoryMeter meter(at::kCPU);
  at::Tensor x = start.expand(shape) * 2;
  const at::Tensor out = run(x);
  x.reset();
  // What MulBackward keeps is the scalar 2 and sizes.
  return meter.allocated() - static_cast<int64_t>(out.nbytes());
}

TEST(Upsample, KeepsNothing) {
  for (const Resample mode : {Resample::nearest, Resample::nearest_exact, Resample::linear, Resample::cubic, Resample::area}) {
    EXPECT_EQ(kept_by([&](const at::Tensor& x) { return upsample(x, {{12, 10}, {}, mode}); }, {4, 8, 6, 5}), 0) << static_cast<int>(mode);
  }
  for (const Resample mode : {Resample::nearest, Resample::nearest_exact, Resample::linear, Resample::area}) {
    EXPECT_EQ(kept_by([&](const at::Tensor& x) { return upsample(x, {{12}, {}, mode}); }, {4, 8, 6}), 0) << static_cast<int>(mode);
    EXPECT_EQ(kept_by([&](const at::Tensor& x) { return upsample(x, {{12}, {}, mode}); }, {4, 8, 6, 5, 3}), 0) << static_cast<int>(mode);
  }
  for (const PadMode mode : {PadMode::zeros, PadMode::reflect, PadMode::replicate, PadMode::circular}) {
    EXPECT_EQ(kept_by([&](const at::Tensor& x) { return pad(x, {2, 1, 1, 0}, mode); }, {4, 8, 6, 5}), 0) << static_cast<int>(mode);
  }
}

TEST(MaxPool, KeepsAsFewBitsAsItsWindowNeeds) {
  const struct {
    std::vector<int64_t> kernel;
    int bits;
  } windows[] = {{{1}, 0}, {{1, 2}, 1}, {{2}, 2}, {{3}, 4}, {{4}, 4}, {{4, 5}, 5}};
  for (const auto& [kernel, bits] : windows) {
    const at::Tensor out = max_pool(leaf({2, 3, 8, 10}), {kernel}, with("actnn"));
    const auto lines = saved_tensors(out);
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_EQ(lines[0].kind, "offsets");
    EXPECT_EQ(lines[0].bits, bits);
    EXPECT_EQ(lines[0].bytes, (out.numel() * bits + 7) / 8);
  }
}

TEST(MaxPool, TiesAndNonFiniteValuesAreTorchs) {
  at::Tensor x = at::randint(0, 3, {2, 3, 9, 8}).to(at::kFloat);  // ties in nearly every window
  x[0][0][4][4] = std::numeric_limits<float>::quiet_NaN();
  x[0][1] = -std::numeric_limits<float>::infinity();
  x[1][1][2][2] = std::numeric_limits<float>::infinity();
  const at::Tensor a = x.clone().requires_grad_(), b = x.clone().requires_grad_();
  const at::Tensor got = max_pool(a, {{3}, {2}, {1}}), want = at::max_pool2d(b, {3, 3}, {2, 2}, {1, 1});
  EXPECT_TRUE(at::allclose(got, want, 0, 0, /*equal_nan=*/true));
  const at::Tensor g = at::randn_like(want);
  EXPECT_TRUE(at::equal(gradients_of(got, g, {a})[0], gradients_of(want, g, {b})[0]));
}

TEST(MaxPool, OfAReluIsPackedOnceAndOnlyForLayersThatReadIt) {
  const at::Tensor x = leaf({4, 8, 12, 12}), w = leaf({4, 8, 3, 3}), v = leaf({6, 8, 1, 1});
  const at::Tensor z = satchel::relu(x), pooled = max_pool(z, {{2}}, {parse_method("satchel"), "pool", {}});
  const auto bytes = [](const at::Tensor& out) { return total_bytes(saved_tensors(out)); };
  const int64_t alone = bytes(pooled) - bytes(z);
  EXPECT_EQ(alone, 4 * 8 * 36 * 2 / 8);  // offsets of 2 bits
  const at::Tensor first = conv(pooled, w);
  const int64_t packed = bytes(first) - bytes(z) - alone;
  EXPECT_GE(packed, 4 * 8 * 36 * 2 / 8);
  const at::Tensor second = conv(pooled, v);
  EXPECT_EQ(bytes(second), bytes(first));
  const auto lines = saved_tensors(first);
  EXPECT_EQ(std::count_if(lines.begin(), lines.end(), [](const SavedTensor& s) { return s.name == "pool" && s.kind == "shared"; }), 1);
}

TEST(MaxPool, EmptyBatchIsTorchs) {
  for (const char* method : {"satchel", "actnn"}) {
    const at::Tensor x = leaf({0, 3, 8, 8});
    const at::Tensor out = max_pool(x, {{2}}, with(method));
    EXPECT_EQ(out.sizes(), at::IntArrayRef({0, 3, 4, 4}));
    EXPECT_EQ(gradients_of(out, at::ones_like(out), {x})[0].numel(), 0);
    EXPECT_EQ(adaptive_avg_pool(x, {1}, with(method)).sizes(), at::IntArrayRef({0, 3, 1, 1}));
    EXPECT_EQ(avg_pool(x, {{2}}, with(method)).sizes(), at::IntArrayRef({0, 3, 4, 4}));
  }
}

TEST(Pools, KeepTheTypeAndChannelsLast) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = at::randn({2, 8, 6, 6}).to(type).requires_grad_();
    for (const at::Tensor& out : {max_pool(x, {{2}}), avg_pool(x, {{2}}), adaptive_avg_pool(x, {3})}) {
      EXPECT_EQ(out.scalar_type(), type);
      EXPECT_TRUE(out.is_contiguous(at::MemoryFormat::ChannelsLast));
      const at::Tensor gradient = gradients_of(out, at::ones_like(out), {x})[0];
      EXPECT_EQ(gradient.scalar_type(), type);
      EXPECT_TRUE(gradient.is_contiguous(at::MemoryFormat::ChannelsLast));
      EXPECT_NEAR(gradient.to(at::kFloat).sum().item<double>(), static_cast<double>(out.numel()), 1e-2 * static_cast<double>(out.numel()));
    }
  }
}

TEST(PoolsRefuse, WhatDoesNotFit) {
  const at::Tensor x = leaf({2, 3, 8, 8});
  EXPECT_EQ(error_of([&] {
              max_pool(leaf({3, 8}), {{2, 2}});
            }),
            "[max_pool] input must be N×C×spatial of 1 to 3 spatial dimensions, got 2");
  EXPECT_EQ(error_of([&] { max_pool(x, {{}}); }), "[max_pool] kernel must have 1 number or 2, got 0");
  EXPECT_EQ(error_of([&] { max_pool(x, {{0}}); }), "[max_pool] kernel must be at least 1, got 0");
  EXPECT_EQ(error_of([&] { max_pool(x, {{2}, {2}, {2}}); }), "[max_pool] padding must be at most half of the kernel, 1, got 2");
  EXPECT_EQ(error_of([&] { avg_pool(x, {{2}, {2}, {0}, {2}}); }), "[avg_pool] dilation must be 1, got 2");
  EXPECT_EQ(error_of([&] { adaptive_avg_pool(x, {-1}); }), "[adaptive_avg_pool] output_size must be at least 0, got -1");
  EXPECT_EQ(error_of([&] { adaptive_avg_pool(x, {1, 2, 3, 4}); }), "[adaptive_avg_pool] output_size must have 1 number or 2, got 4");
  EXPECT_EQ(error_of([&] { upsample(x, {}); }), "[upsample] either size or scale must be given, got none");
  EXPECT_EQ(error_of([&] { upsample(x, {{4}, {2.0}}); }), "[upsample] either size or scale must be given, got both");
  EXPECT_EQ(error_of([&] { upsample(x, {{}, {-1.0}}); }), "[upsample] scale must be more than 0, got -1");
  EXPECT_EQ(error_of([&] {
              upsample(leaf({2, 3, 8}), {{4}, {}, Resample::cubic});
            }),
            "[upsample] cubic takes two spatial dimensions, got 1");
  EXPECT_EQ(error_of([&] { pad(x, {1, 1}, PadMode::reflect); }), "[pad] padding must have 4 numbers, got 2");
  EXPECT_ANY_THROW(max_pool(leaf({2, 3, 1, 1}), {{2}}));  // torch says that the output would be too small
  EXPECT_NE(error_of([&] { max_pool(x.to(at::kDouble), {{2}}); }).find("[max_pool] tensor must be float32"), std::string::npos);
}

}  // namespace
}  // namespace satchel::test
