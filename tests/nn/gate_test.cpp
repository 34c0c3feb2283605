// Gates, ReLU6 and stochastic depth beside the shared gradient test: who rebuilds what, edges, and what is refused.
#include "satchel/autograd/gate.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/report.h"
#include "satchel/core/error.h"
#include "satchel/models/image_model.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::error_of;

SavePolicy with(const std::string& method, const std::string& name) { return {parse_method(method), name, {}}; }

/// The lines of conv(gate(x, s)) by name and kind.
std::vector<std::string> kept(const std::string& gate_method, const std::string& conv_method, bool changed = false) {
  const at::Tensor x = at::randn({4, 8, 6, 6}).requires_grad_(), s = at::rand({4, 8, 1, 1}).requires_grad_();
  const at::Tensor w = at::randn({8, 8, 1, 1}).requires_grad_();
  at::Tensor y = gate(x, s, with(gate_method, "gate"));
  if (changed) y.add_(1);
  std::vector<std::string> lines;
  for (const SavedTensor& line : saved_tensors(conv(y, w, {}, {}, with(conv_method, "conv")))) lines.push_back(line.name + " " + line.kind);
  return lines;
}

TEST(Gate, AConvolutionRebuildsTheProductWhereLayersShare) {
  const std::vector<std::string> shared{"gate input"}, own{"gate input", "conv input"};
  EXPECT_EQ(kept("satchel", "satchel"), shared);
  EXPECT_EQ(kept("satchel,bits=32", "satchel,bits=32"), shared);
  EXPECT_EQ(kept("actnn", "actnn"), own);
  EXPECT_EQ(kept("satchel", "satchel,bits=3"), own) << "of fewer bits than the convolution is told";
  EXPECT_EQ(kept("satchel", "satchel", /*changed=*/true), own);
}

TEST(Gate, KeepsOnlyWhatBackwardReads) {
  const at::Tensor x = at::randn({4, 8, 6, 6}), s = at::rand({4, 8, 1, 1});
  const auto bytes = [](const at::Tensor& y) { return total_bytes(packed_tensors(y)); };
  EXPECT_FALSE(gate(x, s).requires_grad());
  // The gradient of x reads the scale alone, which stands anyway.
  EXPECT_EQ(bytes(gate(x.clone().requires_grad_(), s, with("satchel", "g"))), 0);
  EXPECT_GT(bytes(gate(x, s.clone().requires_grad_(), with("satchel", "g"))), 0);
  const at::Tensor scale = s.clone().requires_grad_(), made = scale * 2, y = gate(x, made, with("satchel", "g"));
  EXPECT_EQ(packed_tensors(y).back().kind, "gate") << "a scale that some function made is kept by the gate";
  const at::Tensor wanted = x.clone().requires_grad_(), changed = s.clone();
  const at::Tensor z = gate(wanted, changed, with("satchel", "g"));
  changed.add_(1);
  EXPECT_ANY_THROW(z.sum().backward()) << "as torch's, where a saved tensor was changed";
}

TEST(Gate, BadInput) {
  const at::Tensor x = at::randn({4, 8, 6, 6});
  EXPECT_EQ(error_of([&] {
              gate(x, at::rand({4, 8}));
            }),
            "[gate] scale must have one number a channel of each sample, [4, 8, 1, 1], got [4, 8]");
  EXPECT_EQ(error_of([&] { gate(x, {}); }), "[gate] scale must have one number a channel of each sample, [4, 8, 1, 1], got nothing");
  EXPECT_EQ(error_of([&] { gate(at::randn({4, 8}), at::rand({4, 8})); }), "[gate] x must be a map N×C×spatial, got [4, 8]");
  EXPECT_NE(error_of([&] { gate(x, at::rand({4, 8, 1, 1}, at::kBFloat16)); }).find("[gate] scale must have x's type"), std::string::npos);
  EXPECT_EQ(gate(at::zeros({0, 8, 6, 6}), at::zeros({0, 8, 1, 1}).requires_grad_()).numel(), 0);
}

TEST(Relu6, PassesWhereTorchDoes) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  const at::Tensor values = at::tensor({-infinity, -1.F, -0.F, 0.F, 1e-30F, 3.F, 5.9999995F, 6.F, 7.F, infinity, nan}).view({1, 11, 1, 1});
  const at::Tensor ours = values.clone().requires_grad_(), torchs = values.clone().requires_grad_();
  const at::Tensor y = relu6(ours, with("satchel", "a")), z = at::hardtanh(torchs, 0, 6);
  y.sum().backward();
  z.sum().backward();
  EXPECT_TRUE(at::allclose(y, z, 0, 0, /*equal_nan=*/true));
  EXPECT_TRUE(at::equal(ours.grad(), torchs.grad())) << ours.grad().flatten();
}

TEST(DropSamples, WholeSamplesAreLeftOut) {
  at::manual_seed(4);
  const at::Tensor x = at::ones({4000, 3, 2, 2}).requires_grad_();
  const at::Tensor y = drop_samples(x, 0.25, true, with("satchel", "d")), first = y.select(1, 0).select(1, 0).select(1, 0);
  EXPECT_TRUE(at::equal(y, first.view({-1, 1, 1, 1}).expand_as(y)));
  EXPECT_TRUE(first.eq(0).logical_or(first.sub(4.0 / 3).abs().lt(1e-4)).all().item<bool>());
  // 3,000 of 4,000 stay, with a deviation of √(4000·¼·¾) = 27: five of them.
  EXPECT_NEAR(first.ne(0).sum().item<double>(), 3000, 137);
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y.detach()));
  EXPECT_TRUE(drop_samples(x, 0.25, /*training=*/false).is_same(x));
  EXPECT_TRUE(drop_samples(x, 0).is_same(x));
  EXPECT_EQ(error_of([&] { drop_samples(x, 1); }).rfind("[drop_samples] ", 0), 0u);
  EXPECT_EQ(error_of([&] { drop_samples(at::ones({}).requires_grad_(), 0.5); }),
            "[drop_samples] x must have at least one dimension, got 0");
}

// Frozen blocks give the same map every time: no statistics of the batch, no stochastic depth.
TEST(DropSamples, FrozenBlocksLeaveNothingOut) {
  ImageModelOptions o;
  o.name = "efficientnet_b0";
  o.width = 16;
  o.dropout = 0;
  o.stochastic_depth = 0.9;
  o.freeze = "features.8";
  ImageModel model = make_image_model(o);
  ASSERT_TRUE(model->is_training());
  const at::Tensor x = at::randn({4, 3, 32, 32});
  EXPECT_TRUE(at::equal(model->forward(x), model->forward(x)));
  o.freeze.clear();
  model = make_image_model(o);
  EXPECT_FALSE(at::equal(model->forward(x), model->forward(x)));
}

}  // namespace
}  // namespace satchel
