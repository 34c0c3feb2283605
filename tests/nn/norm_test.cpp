// Norms, activations and dropout as modules and on maps: state dicts, types, orders, bad input.
#include "satchel/nn/norm.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/normalization.h>

#include <cmath>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/report.h"
#include "satchel/autograd/smooth.h"
#include "satchel/core/error.h"
#include "satchel/nn/activation.h"
#include "satchel/nn/dropout.h"
#include "tests/autograd/gradient.h"
#include "tests/torch_support.h"

namespace satchel::test {
namespace {

NormWeights weights_of(int64_t channels) { return {leaf({channels}), leaf({channels}), {}, {}}; }

/// Same parameters, buffers, values and running statistics as torch's after two batches, in training and in evaluation.
template <class Theirs, class Ours>
void expect_same_module(Theirs theirs, Ours ours, at::IntArrayRef shape) {
  std::vector<std::string> names;
  const auto tensors = [](auto& m) {
    auto all = m->named_parameters();
    for (const auto& item : m->named_buffers()) all.insert(item.key(), item.value());
    return all;
  };
  const auto want = tensors(theirs), got = tensors(ours);
  ASSERT_EQ(want.keys(), got.keys());
  for (const bool training : {true, true, false}) {
    theirs->train(training);
    ours->train(training);
    const at::Tensor x = at::randn(shape).mul_(2).add_(1);
    EXPECT_TRUE(at::allclose(ours->forward(x), theirs->forward(x), 1e-5, 1e-5));
  }
  for (const auto& item : tensors(theirs)) EXPECT_TRUE(at::allclose(item.value(), tensors(ours)[item.key()], 1e-5, 1e-6)) << item.key();
  EXPECT_TRUE(std::dynamic_pointer_cast<typename Ours::Impl>(ours->clone()) != nullptr);
}

TEST(Modules, HaveTorchsStateAndValues) {
  using O = torch::nn::BatchNormOptions;
  for (const O& o :
       {O(6), O(6).affine(false), O(6).track_running_stats(false), O(6).momentum(c10::nullopt), O(6).momentum(0.3).eps(1e-3)}) {
    expect_same_module(torch::nn::BatchNorm1d(o), nn::BatchNorm1d(o), {7, 6});
    expect_same_module(torch::nn::BatchNorm1d(o), nn::BatchNorm1d(o), {7, 6, 3});
    expect_same_module(torch::nn::BatchNorm2d(o), nn::BatchNorm2d(o), {3, 6, 4, 5});
    expect_same_module(torch::nn::BatchNorm3d(o), nn::BatchNorm3d(o), {3, 6, 2, 4, 2});
  }
  using L = torch::nn::LayerNormOptions;
  for (const L& o : {L({5}), L({4, 5}), L({5}).elementwise_affine(false)}) {
    expect_same_module(torch::nn::LayerNorm(o), nn::LayerNorm(o), {3, 6, 4, 5});
  }
  using G = torch::nn::GroupNormOptions;
  for (const G& o : {G(3, 6), G(1, 6), G(6, 6).affine(false)}) expect_same_module(torch::nn::GroupNorm(o), nn::GroupNorm(o), {3, 6, 4, 5});
}

/// RMSNorm → ReLU after a linear layer, its gradients by torch.
at::Tensor rms_loss(const std::vector<at::Tensor>& in, const SavePolicy* saving) {
  if (saving == nullptr) return at::relu(at::rms_norm(at::linear(in[0], in[1]), {64}, in[2], 1e-6)).mul(in[3]).sum();
  return relu(rms_norm(linear(in[0], in[1], {}, *saving), {64}, in[2], 1e-6, *saving), *saving).mul(in[3]).sum();
}

TEST(RmsNorm, IsTorchsAt32Bits) {
  for (const char* method : {"satchel,bits=32", "exact,bits=32,project=none", "actnn,bits=32"}) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{5}, {4, 5}}) {
      const SavePolicy s = saving_of(method);
      nn::RMSNorm module(nn::RMSNormOptions{shape}, s);
      {
        const at::NoGradGuard no_grad;
        module->weight.copy_(at::randn(shape));
      }
      const at::Tensor x = leaf({3, 6, 4, 5}), g = at::randn({3, 6, 4, 5});
      const at::Tensor out = module->forward(x), exact = at::rms_norm(x, shape, module->weight, 1e-6);
      EXPECT_TRUE(at::allclose(out, exact, 1e-5, 1e-6)) << method;
      const auto got = torch::autograd::grad({out}, {x, module->weight}, {g}),
                 want = torch::autograd::grad({exact}, {x, module->weight}, {g});
      for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::allclose(got[i], want[i], 1e-4, 1e-5)) << method << " " << i;
    }
  }
  EXPECT_THROW(satchel::rms_norm(leaf({4, 8}), {7}, {}), Error);
  EXPECT_THROW(satchel::rms_norm(leaf({4, 8}), {8}, {}, -1), Error);
}

TEST(RmsNorm, GradientsAreRightOnAverage) {
  at::manual_seed(9);
  const std::vector<at::Tensor> in = {at::randn({256, 32}), leaf({64, 32}), leaf({64}), at::randn({256, 64})};
  const SavePolicy s = saving_of("satchel");
  const auto exact = torch::autograd::grad({rms_loss(in, nullptr)}, {in[1], in[2]});
  constexpr int kSeeds = 200;
  for (size_t i = 0; i < 2; ++i) {
    std::vector<double> along;
    for (int seed = 0; seed < kSeeds; ++seed) {
      const SeedRun run(static_cast<uint64_t>(seed) + 1);
      const at::Tensor e = torch::autograd::grad({rms_loss(in, &s)}, {in[1], in[2]})[i] - exact[i];
      along.push_back((e * exact[i]).sum().item<double>() / exact[i].norm().item<double>());
    }
    const at::Tensor all = at::tensor(along, at::kDouble);
    const double error = all.std().item<double>() / std::sqrt(double(kSeeds));
    EXPECT_GT(error, 0) << "no noise: nothing was packed";
    EXPECT_LE(std::abs(all.mean().item<double>()), 5 * error) << i;  // by chance once in a million
  }
}

TEST(Modules, StandInASequential) {
  at::manual_seed(1);
  const SavePolicy s = saving_of("satchel");
  torch::nn::Sequential model(nn::BatchNorm2d(torch::nn::BatchNormOptions(8), s), nn::ReLU(torch::nn::ReLUOptions(true), s),
                              nn::Dropout(torch::nn::DropoutOptions(0.1), s), nn::GroupNorm(torch::nn::GroupNormOptions(2, 8), s),
                              nn::LeakyReLU(torch::nn::LeakyReLUOptions(), s), nn::ELU(torch::nn::ELUOptions(), s),
                              nn::GELU(torch::nn::GELUOptions(), s), nn::SiLU(s), nn::LayerNorm(torch::nn::LayerNormOptions({5}), s));
  const at::Tensor x = leaf({3, 8, 5, 5}), out = model->forward(x);
  EXPECT_EQ(out.sizes(), x.sizes());
  out.sum().backward();
  EXPECT_TRUE(x.grad().defined() && !x.grad().isnan().any().item<bool>());
  std::stringstream text;
  text << *model;
  EXPECT_NE(text.str().find("satchel::nn::GroupNorm(2, 8"), std::string::npos);
}

TEST(Modules, ForwardActAddsTheSkip) {
  for (const char* method : {"fp32", "satchel,bits=32", "actnn,level=1", "actnn", "satchel"}) {
    at::manual_seed(2);
    nn::BatchNorm2d norm(torch::nn::BatchNormOptions(8), saving_of(method));
    torch::nn::BatchNorm2d theirs(torch::nn::BatchNormOptions(8));
    const at::Tensor x = leaf({3, 8, 5, 5}), skip = leaf({3, 8, 5, 5});
    for (const Activation activation : {Activation::relu, Activation::none}) {
      const at::Tensor sum = theirs->forward(x) + skip;
      EXPECT_TRUE(at::allclose(norm->forward_act(x, activation, skip), activation == Activation::relu ? at::relu(sum) : sum, 1e-4, 1e-5));
      EXPECT_TRUE(
          at::allclose(norm->forward_act(x, activation), activation == Activation::relu ? at::relu(sum - skip) : sum - skip, 1e-4, 1e-5));
      theirs->forward(x);
    }
    EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 4);
  }
}

/// A norm of which only a sum reads the result keeps what forward() keeps once its output has met no activation, and at once.
TEST(Modules, ForwardToSumKeepsTheNormsOwn) {
  for (const char* method : {"fp32", "satchel,bits=32", "satchel", "actnn", "division", "exact"}) {
    for (const bool training : {true, false}) {
      at::manual_seed(2);
      nn::BatchNorm2d norm(torch::nn::BatchNormOptions(8), saving_of(method));
      torch::nn::BatchNorm2d theirs(torch::nn::BatchNormOptions(8));
      norm->train(training), theirs->train(training);
      const at::Tensor x = leaf({16, 8, 12, 12}), skip = leaf({16, 8, 12, 12});
      const at::Tensor want = theirs->forward(x), y = norm->forward_to_sum(x);
      const std::vector<SavedTensor> lines = saved_tensors(y);
      EXPECT_TRUE(at::allclose(y, want, 1e-4, 1e-5)) << method;
      const SeedRun run(3);
      const at::Tensor waits = norm->forward(x), sum = waits + skip;
      EXPECT_EQ(saved_tensors(sum), lines) << method << (training ? " training" : " evaluating");
      if (std::string(method) != "fp32" && std::string(method) != "satchel,bits=32") continue;  // the others' gradients are noisy
      const at::Tensor g = at::randn_like(y);
      const auto gradients = [&](const at::Tensor& out) { return torch::autograd::grad({out}, {x}, {g})[0]; };
      EXPECT_TRUE(at::allclose(gradients(y), gradients(want), 1e-4, 1e-5)) << method;
    }
  }
  NormActOptions options;
  options.only_added = true;
  EXPECT_THROW(norm_act(leaf({4, 8}), weights_of(8), options, saving_of("satchel")), Error);
}

/// Halves in, halves out; statistics in float32. bf16 keeps 8 bits: 2^−8 of values up to 4, and of gradients up to the largest.
TEST(Types, HalvesComeBackAsHalves) {
  for (const char* method : {"satchel,bits=32", "satchel", "actnn", "division", "exact"}) {
    for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
      at::manual_seed(4);
      const SavePolicy s = saving_of(method);
      const NormWeights w = weights_of(8);
      const at::Tensor x = leaf({4, 8, 6, 6}, type), skip = leaf({4, 8, 6, 6}, type);
      const at::Tensor want = at::relu(at::batch_norm(x.to(at::kFloat), w.gamma, w.beta, {}, {}, true, 0.1, 1e-5, false) + skip);
      const at::Tensor sum = norm_add_act(x, w, skip, {}, s), act = norm_act(x, w, {}, s);
      EXPECT_EQ(sum.scalar_type(), type);
      EXPECT_LE((sum - want).abs().max().item<double>(), 3 * 0x1p-8 * want.abs().max().item<double>()) << method;
      const at::Tensor other = silu(gelu(elu(dropout(leaky_relu(act, 0.1, s), 0.2, true, s), 1.0, s), "none", s), s);
      const auto gradients = gradients_of(other, at::ones_like(other), {x, w.gamma, w.beta});
      EXPECT_EQ(gradients[0].scalar_type(), type);
      EXPECT_EQ(gradients[1].scalar_type(), at::kFloat);
      const auto skips = gradients_of(sum, at::ones_like(sum), {skip, x});
      EXPECT_TRUE(at::equal(skips[0].to(at::kFloat), (sum > 0).to(at::kFloat))) << method;
    }
  }
}

TEST(Types, AutocastCastsNothingHere) {
  at::manual_seed(4);
  const NormWeights w = weights_of(8);
  const at::Tensor x = leaf({4, 8, 6, 6}, at::kBFloat16), g = at::randn({4, 8, 6, 6}).to(at::kBFloat16);
  std::vector<std::vector<at::Tensor>> runs;
  for (const bool cast : {false, true}) {
    at::manual_seed(6);
    at::autocast::set_autocast_enabled(at::kCPU, cast);
    const at::Tensor y = satchel::silu(satchel::group_norm(norm_act(x, w, {}), 2, w));
    runs.push_back(gradients_of(y, g, {x, w.gamma}));
    runs.back().push_back(y.detach());
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  for (size_t i = 0; i < runs[0].size(); ++i) EXPECT_TRUE(at::equal(runs[0][i], runs[1][i])) << i;
}

TEST(Maps, ComeBackInChannelsLastOrder) {
  const NormWeights w = weights_of(8);
  for (const char* method : {"satchel", "actnn"}) {
    const SavePolicy s = saving_of(method);
    for (const bool last : {false, true}) {
      at::Tensor x = at::randn({3, 8, 5, 4});
      if (last) x = x.contiguous(at::MemoryFormat::ChannelsLast);
      x.requires_grad_();
      for (const at::Tensor& y : {batch_norm(x, w, {}, s), norm_act(x, w, {}, s), relu(x, s), group_norm(x, 2, w, {}, s),
                                  norm_add_act(x, w, x, {}, s), dropout(x, 0.5, true, s), elu(x, 1.0, s)}) {
        EXPECT_TRUE(y.is_contiguous(at::MemoryFormat::ChannelsLast)) << method;
      }
    }
  }
}

/// Expanded and permuted gradients reach the same place as contiguous ones.
TEST(Maps, TakeGradientsInAnyOrder) {
  at::manual_seed(4);
  const NormWeights w = weights_of(8);
  const at::Tensor x = leaf({1, 8, 4, 4}), flat = at::randn({1, 8, 1, 1}).expand({1, 8, 4, 4});
  const at::Tensor before = flat.clone();
  const Inputs inputs{x, w.gamma, w.beta};
  const at::Tensor out = norm_act(x, w, {}, saving_of("satchel"));
  const auto want = gradients_of(out, flat.contiguous(), inputs, true);
  for (const at::Tensor& g : {flat, flat.contiguous(at::MemoryFormat::ChannelsLast)}) {
    const auto got = torch::autograd::grad({out}, inputs, {g}, true);
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << i;
  }
  EXPECT_TRUE(at::equal(flat, before));  // nobody wrote over memory that many values share
}

TEST(Maps, NonFiniteValuesAreNotHidden) {
  at::manual_seed(4);
  for (const char* method : {"satchel", "actnn", "division"}) {
    const SavePolicy s = saving_of(method);
    const NormWeights w = weights_of(8);
    at::Tensor x = at::randn({3, 8, 5, 5});
    x[1][2][3][3] = std::numeric_limits<float>::infinity();
    x.requires_grad_();
    const at::Tensor out = norm_act(x, w, {}, s);
    EXPECT_TRUE(out.isnan().any().item<bool>()) << method;
    EXPECT_TRUE(gradients_of(out, at::ones_like(out), {x, w.gamma})[1].isnan().any().item<bool>()) << method;
  }
  const at::Tensor low = at::full({1, 8, 2, 2}, -std::numeric_limits<float>::infinity()).requires_grad_();
  EXPECT_EQ(satchel::relu(low).sum().item<float>(), 0);
}

TEST(Maps, EmptyBatchesAndOddOnesAreHandled) {
  const SavePolicy s = saving_of("satchel");
  const NormWeights w = weights_of(8);
  const at::Tensor empty = leaf({0, 8, 4, 4}), one = leaf({1, 8, 1, 1});
  EXPECT_THROW(batch_norm(empty, w, {}, s), Error);
  EXPECT_THROW(batch_norm(one, w, {}, s), Error);
  for (const at::Tensor& y : {relu(empty, s), leaky_relu(empty, 0.1, s), gelu(empty, "none", s), dropout(empty, 0.5, true, s),
                              group_norm(empty, 2, w, {}, s), layer_norm(empty, {4}, {}, {}, s)}) {
    EXPECT_EQ(y.sizes(), empty.sizes());
    EXPECT_EQ(gradients_of(y, at::ones_like(y), {empty})[0].sizes(), empty.sizes());
  }
  const at::Tensor odd = norm_act(leaf({3, 8, 1, 7}), w, {}, s);
  EXPECT_EQ(gradients_of(odd, at::ones_like(odd), {w.gamma})[0].sizes(), w.gamma.sizes());
}

TEST(Refuses, WhatDoesNotFit) {
  const NormWeights w = weights_of(8);
  EXPECT_THROW(batch_norm(leaf({4, 6, 3, 3}), w), Error);
  EXPECT_THROW(batch_norm(leaf({8}), w), Error);
  EXPECT_THROW(norm_add_act(leaf({4, 8, 3, 3}), w, leaf({4, 8, 3, 2}), {}), Error);
  EXPECT_THROW(group_norm(leaf({4, 8, 3, 3}), 3, w), Error);
  EXPECT_THROW(satchel::layer_norm(leaf({4, 8}), {7}, NormWeights()), Error);
  EXPECT_THROW(satchel::gelu(leaf({4}), "erf"), Error);
  EXPECT_THROW(nn::BatchNorm2d(torch::nn::BatchNormOptions(8))->forward(leaf({4, 8, 3})), Error);
  EXPECT_THROW(nn::GroupNorm(torch::nn::GroupNormOptions(3, 8)), Error);
  EXPECT_THROW(nn::Dropout(torch::nn::DropoutOptions(1.5)), Error);
}

}  // namespace
}  // namespace satchel::test
