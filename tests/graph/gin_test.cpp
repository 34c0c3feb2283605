// GIN as its paper and PyG define it: MLP(x + Σ neighbours).
#include <ATen/ops/arange.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "satchel/graph/layer.h"
#include "satchel/plan/graph_plan.h"
#include "tests/one_thread.h"
#include "tests/train/train_common.h"

namespace satchel {
namespace {

using namespace train_test;

/// Edges 0 – 1 and 1 – 2, in both directions; node 3 stands alone.
Csr path(const at::Tensor& value = {}) {
  return csr_from_coo(at::tensor({0, 1, 1, 2}, at::kLong), at::tensor({1, 0, 2, 1}, at::kLong), 4, 4, value);
}

std::shared_ptr<GraphConvImpl> gin(int64_t in, int64_t out, const std::string& method) {
  at::manual_seed(6);
  return make_layer("gin", {in, out, true, SavePolicy{parse_method(method), "convs.0"}});
}

TEST(Gin, AddsNeighboursAndTheNodeItself) {
  const auto layer = gin(1, 2, "satchel");
  const auto parameters = layer->named_parameters();
  const auto set = [&](const char* name, const at::Tensor& values) { parameters[name].detach().copy_(values); };
  set("nn.lins.0.weight", at::tensor({1.f, -1.f}).view({2, 1}));
  set("nn.lins.0.bias", at::tensor({-5.f, 5.f}));
  set("nn.lins.1.weight", at::tensor({1.f, 10.f, 0.f, 1.f}).view({2, 2}));
  set("nn.lins.1.bias", at::tensor({100.f, 0.f}));
  const at::Tensor x = at::tensor({1.f, 2.f, 4.f, 8.f}).view({4, 1});
  // Sums 3, 7, 6, 8; hidden rows (0, 2), (2, 0), (1, 0), (3, 0).
  const at::Tensor expected = at::tensor({120.f, 2.f, 102.f, 0.f, 101.f, 0.f, 103.f, 0.f}).view({4, 2});
  for (const bool self_loops : {false, true})  // the node is counted once in any case
    EXPECT_TRUE(layer->forward(x, layer_adjacency("gin", path(), self_loops)).equal(expected)) << self_loops;
  EXPECT_TRUE(layer->forward_data({x}, layer_adjacency("gin", path())).equal(expected));
  // Weights 3 and 0.5: sums 7, 7, 5, 8.
  const at::Tensor weighted = layer->forward(x, layer_adjacency("gin", path(at::tensor({3.f, 3.f, .5f, .5f}))));
  EXPECT_TRUE(weighted.equal(at::tensor({102.f, 0.f, 102.f, 0.f, 100.f, 0.f, 103.f, 0.f}).view({4, 2}))) << weighted;
}

TEST(Gin, ParametersAreThoseOfPyg) {
  const auto layer = gin(9, 4, "satchel");
  std::vector<std::string> names;
  for (const auto& p : layer->named_parameters()) {
    names.push_back(p.key());
    // torch's choice for a Linear: uniform within 1/√in.
    const double most = 1 / std::sqrt(p.key().find("lins.0") != std::string::npos ? 9.0 : 4.0);
    EXPECT_LE(p.value().abs().max().item<double>(), most) << p.key();
    EXPECT_GT(p.value().abs().max().item<double>(), most / 4) << p.key();
  }
  EXPECT_EQ(names, (std::vector<std::string>{"nn.lins.0.weight", "nn.lins.0.bias", "nn.lins.1.weight", "nn.lins.1.bias"}));
  EXPECT_TRUE(layer->named_buffers().is_empty());
}

TEST(Gin, RefusesWhatDoesNotFit) {
  const auto layer = gin(3, 4, "satchel");
  const Adjacency a = layer_adjacency("gin", path());
  expect_refused([&] { layer->forward(at::ones({4, 2}), a); }, "[gin] x must be float32, float16 or bfloat16 [4, 3] on cpu");
  expect_refused([&] { layer->forward_data({at::ones({5, 3})}, a); }, "[gin] x must be");
  expect_refused([] { gin(3, 0, "satchel"); }, "[gin] in and out must be at least 1, got 0");
}

/// At 2 bits gradients are right on average.
TEST(Gin, GradientsAreTorchsOnAverage) {
  constexpr int64_t kRows = 64, kDraws = 200;
  const test::OneThread one_thread;
  at::manual_seed(5);
  const Csr graph = made_symmetric(csr_from_coo(at::randint(kRows, {200}), at::randint(kRows, {200}), kRows, kRows));
  const Adjacency a = layer_adjacency("gin", graph);
  const at::Tensor dense = multiply(without_self_loops(graph), at::eye(kRows)) + at::eye(kRows);
  for (const char* method : {"satchel", "exact", "blockwise", "gact"}) {
    const auto layer = gin(12, 8, method);
    const at::Tensor x = at::randn({kRows, 12}).requires_grad_(), g = at::randn({kRows, 8});
    const auto w = layer->parameters();
    std::vector<at::Tensor> inputs = w;
    inputs.push_back(x);
    const at::Tensor hidden = at::relu(at::linear(dense.matmul(x), w[0], w[1]));
    const auto want = torch::autograd::grad({at::linear(hidden, w[2], w[3])}, inputs, {g});
    std::vector<at::Tensor> sum, square;
    for (const at::Tensor& t : want) {
      sum.push_back(at::zeros_like(t));
      square.push_back(at::zeros_like(t));
    }
    for (int64_t draw = 0; draw < kDraws; ++draw) {
      at::manual_seed(100 + draw);
      const auto got = torch::autograd::grad({layer->forward(x, a)}, inputs, {g});
      for (size_t i = 0; i < got.size(); ++i) {
        sum[i] += got[i] - want[i];
        square[i] += (got[i] - want[i]).square();
      }
    }
    double noise = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      // The squared mean of n draws has Σσ²/n on average; twice the deviation and rounding of float32 beside it.
      const double deviation = square[i].sum().sqrt().item<double>() / kDraws;
      noise += deviation;
      EXPECT_LE((sum[i] / kDraws).norm().item<double>(), 2 * deviation + 1e-5 * want[i].norm().item<double>()) << method << ' ' << i;
    }
    EXPECT_GT(noise, 0) << method << " packs";
  }
}

TEST(Gin, PlanKeepsXAndOneCodeOfTheReLU) {
  GraphShape shape{"gin", 2, 10, 12, 3};
  shape.norm = Norm::none;
  shape.activation = Activation::none;
  shape.dropout = 0;
  const auto names = [&](const char* method) {
    std::vector<std::string> lines;
    for (const SavedTensor& s : plan_graph(shape, 100, parse_method(method))) lines.push_back(s.name + ' ' + s.kind);
    return lines;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names("satchel"), (Names{"convs.0.nn.act shared", "convs.1 input", "convs.1.nn.act shared"}));
  EXPECT_EQ(names("actnn,adaptive=no"),
            (Names{"convs.0.nn.act mask", "convs.0.nn.lins.1 input", "convs.1 input", "convs.1.nn.act mask", "convs.1.nn.lins.1 input"}));
  EXPECT_EQ(names("fp32"), (Names{"convs.0 aggregate", "convs.0.nn.lins.1 input", "convs.1 aggregate", "convs.1.nn.lins.1 input"}));
}

TEST(Gin, LearnsInHalves) {
  const test::OneThread one_thread;
  for (const Amp amp : {Amp::bf16, Amp::fp16}) {
    for (const char* method : {"fp32", "exact", "satchel"}) {
      TrainOptions o = small(method, 40);
      o.shape.conv = "gin";
      o.amp = amp;
      EXPECT_GT(train_graph(communities(), o).test, 70.0) << method;  // chance is 25 %
    }
  }
}

}  // namespace
}  // namespace satchel
