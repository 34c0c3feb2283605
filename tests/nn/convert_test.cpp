// A Sequential of torch's layers, converted: the same parameters, the same numbers, less kept.
#include "satchel/nn/convert.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/upsampling.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <set>

#include "satchel/autograd/report.h"
#include "satchel/core/error.h"
#include "satchel/nn/conv.h"

namespace satchel {
namespace {

using torch::nn::Sequential;
using Names = std::vector<std::string>;

/// A module of somebody's own.
struct DoubleImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return 2 * x; }
};
TORCH_MODULE(Double);

/// One that derives from torch's and does something else.
struct LoudConvImpl : torch::nn::Conv2dImpl {
  using Conv2dImpl::Conv2dImpl;
  at::Tensor forward(const at::Tensor& x) { return Conv2dImpl::forward(x) + 1; }
};
TORCH_MODULE(LoudConv);

nn::Stack block(int64_t in, int64_t out) {
  return nn::Stack(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1)), torch::nn::BatchNorm2d(out),
                   torch::nn::ReLU(torch::nn::ReLUOptions(true)));
}

Sequential network() {
  Sequential net;
  net->push_back("stem", block(3, 8));
  net->push_back("pool", torch::nn::MaxPool2d(2));
  net->push_back("double", Double());
  net->push_back("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 8, 3).bias(false).groups(2)));
  net->push_back("loud", LoudConv(torch::nn::Conv2dOptions(8, 8, 1)));
  net->push_back("average", torch::nn::AdaptiveAvgPool2d(1));
  net->push_back("flatten", torch::nn::Flatten());
  net->push_back("head", torch::nn::Linear(8, 5));
  return net;
}

std::vector<at::Tensor> gradients(Sequential& net, const at::Tensor& x) {
  net->zero_grad();
  const at::Tensor y = net->forward(x);
  (y * at::arange(y.numel()).view(y.sizes()).sin()).sum().backward();
  std::vector<at::Tensor> all = {y.detach()};
  for (const at::Tensor& p : net->parameters()) all.push_back(p.grad().clone());
  return all;
}

TEST(Convert, SaysWhatItDid) {
  const nn::Converted made = nn::convert(network(), parse_method("satchel"));
  EXPECT_EQ(made.converted, (Names{"stem.0", "stem.1", "stem.2", "pool", "conv", "average", "head"}));
  EXPECT_EQ(made.left, (Names{"double", "loud", "flatten"}));
  EXPECT_EQ(network()->named_parameters().keys(), made.model->named_parameters().keys());
  EXPECT_EQ(network()->named_buffers().keys(), made.model->named_buffers().keys());
}

TEST(Convert, ParametersAndBuffersAreTheSame) {
  Sequential old = network();
  nn::Converted made = nn::convert(old, parse_method("satchel"));
  const auto theirs = old->parameters(), ours = made.model->parameters();
  ASSERT_EQ(theirs.size(), ours.size());
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(theirs[i].is_same(ours[i])) << i;
  // An optimizer of the old one trains the new one; statistics go to both.
  torch::optim::SGD optimizer(old->parameters(), 0.1);
  const at::Tensor x = at::randn({4, 3, 8, 8}), before = old->named_parameters()["conv.weight"].clone();
  made.model->forward(x).sum().backward();
  optimizer.step();
  EXPECT_FALSE(made.model->named_parameters()["conv.weight"].equal(before));
  EXPECT_EQ(old->named_buffers()["stem.1.num_batches_tracked"].item<int64_t>(), 1);
  EXPECT_TRUE(old->named_buffers()["stem.1.running_mean"].equal(made.model->named_buffers()["stem.1.running_mean"]));
  EXPECT_FALSE(old->named_buffers()["stem.1.running_mean"].equal(at::zeros({8})));
  // What a layer's forward reads is what it registered.
  const auto* conv = made.model->named_children()["conv"]->as<nn::Conv2dImpl>();
  ASSERT_NE(conv, nullptr);
  EXPECT_TRUE(conv->weight.is_same(old->named_parameters()["conv.weight"]));
}

TEST(Convert, ThirtyTwoBitsGiveTheOldGradients) {
  for (const char* method : {"satchel,bits=32", "actnn,adaptive=no,bits=32", "fp32"}) {
    Sequential old = network();
    nn::Converted made = nn::convert(old, parse_method(method));
    const at::Tensor x = at::randn({4, 3, 9, 9});
    const std::vector<at::Tensor> a = gradients(old, x), b = gradients(made.model, x);
    for (size_t i = 0; i < a.size(); ++i) {
      // Sums of up to 4·81·27 products in another order: √n·2^-24 of the largest, 6e-6; ten times that through three layers.
      EXPECT_LE((a[i] - b[i]).abs().max().item<double>(), 1e-4 * a[i].abs().max().item<double>() + 1e-6) << method << ' ' << i;
    }
  }
}

TEST(Convert, LayersSaveByTheirNames) {
  nn::Converted made = nn::convert(network(), SavePolicy{parse_method("satchel"), "net"});
  std::set<std::string> names;
  for (const SavedTensor& s : saved_tensors(made.model->forward(at::randn({4, 3, 8, 8})))) names.insert(s.name);
  // stem.2, the ReLU, took over what stem.1 would have kept.
  EXPECT_TRUE(names.contains("net.stem.0") && names.contains("net.conv") && names.contains("net.head"));
  EXPECT_FALSE(names.contains("net.double"));
}

TEST(Convert, ModesAreEachTheirOwn) {
  Sequential old = network();
  old->named_children()["stem"]->named_children()["1"]->eval();  // a frozen norm in a model that trains
  const nn::Converted made = nn::convert(old, parse_method("satchel"));
  for (const auto& item : made.model->named_modules()) {
    EXPECT_EQ(item.value()->is_training(), item.key() != "stem.1") << item.key();
  }
  for (const auto& item : old->named_modules()) EXPECT_EQ(item.value()->is_training(), item.key() != "stem.1") << item.key();
}

TEST(Convert, EveryKindOfLayer) {
  using namespace torch::nn;
  const auto all_converted = [](torch::nn::Sequential net, const at::Tensor& x) {
    nn::Converted made = nn::convert(net, parse_method("satchel,bits=32"));
    EXPECT_TRUE(made.left.empty()) << made.left.front();
    const at::Tensor expected = net->forward(x), got = made.model->forward(x);
    EXPECT_EQ(got.sizes(), expected.sizes());
    EXPECT_TRUE(at::allclose(got, expected, 1e-4, 1e-4)) << net->name();
  };
  all_converted(Sequential(Conv1d(4, 6, 3), BatchNorm1d(6), LeakyReLU(), MaxPool1d(2), AvgPool1d(2), AdaptiveAvgPool1d(3)),
                at::randn({2, 4, 20}));
  all_converted(Sequential(ConvTranspose1d(4, 4, 3), GroupNorm(GroupNormOptions(2, 4)), ELU()), at::randn({2, 4, 9}));
  all_converted(Sequential(ConvTranspose2d(ConvTranspose2dOptions(4, 6, 3).stride(2)), GELU(), AvgPool2d(2),
                           Upsample(UpsampleOptions().scale_factor(std::vector<double>{2, 2}).mode(torch::kNearest))),
                at::randn({2, 4, 7, 7}));
  all_converted(Sequential(Conv3d(2, 4, 3), BatchNorm3d(4), ReLU(), MaxPool3d(2), ConvTranspose3d(4, 2, 2), AvgPool3d(2), SiLU(),
                           AdaptiveAvgPool3d(1)),
                at::randn({2, 2, 8, 8, 8}));
  all_converted(Sequential(Linear(6, 8), LayerNorm(LayerNormOptions({8})), Dropout(0.0)), at::randn({5, 6}));
}

TEST(Convert, NothingToConvert) {
  EXPECT_THROW(nn::convert(torch::nn::Sequential(nullptr), parse_method("satchel")), Error);
  const nn::Converted made = nn::convert(Sequential(), parse_method("satchel"));
  EXPECT_TRUE(made.converted.empty() && made.left.empty());
  EXPECT_EQ(made.model->size(), 0u);
}

}  // namespace
}  // namespace satchel
