// Chains with a weighted layer before the norm: gradients of all weights, on average over rounding, beside plain torch. What is expected
// contains nothing of the code. A norm's own input gradient is tested in the shared gradient test; errors that add up to nothing there
// may add up to something in the weights before it (docs/theory.md 10).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/core/noise.h"
#include "tests/autograd/gradient.h"

namespace satchel::test {
namespace {

/// γ < 0 in half of the channels, one dead, one always on.
Inputs norm_leaves(int64_t channels) {
  at::Tensor gamma = 1 + 0.2 * at::randn({channels}), beta = 0.2 * at::randn({channels});
  for (int64_t c = 0; c < channels; c += 2) gamma[c] = -gamma[c];
  beta[1] = -6;
  beta[2] = 6;
  return {gamma, beta};
}

/// in: the weight before the norm, γ, β, the weight after it. Torch's and ours differ in nothing else.
struct WeightedChain {
  std::string name;
  at::Tensor x, target;
  Inputs leaves;
  std::function<at::Tensor(const at::Tensor& x, const Inputs& in, const SavePolicy*)> run;
};

WeightedChain rows_chain(std::string name, int64_t rows, Norm norm, Activation activation) {
  constexpr int64_t kIn = 16, kOut = 6;
  const int64_t channels = norm == Norm::layer ? 64 : 32;
  at::manual_seed(31);
  WeightedChain c{std::move(name), at::randn({rows, kIn}).matmul(at::randn({kIn, kIn})) / 4, {}, {}, {}};
  const Inputs weights = norm_leaves(channels);
  c.leaves = {at::randn({channels, kIn}) / 4, weights[0], weights[1], at::randn({kOut, channels}) / 8};
  c.target = c.x.matmul(at::randn({kIn, kOut})) / 4;
  c.run = [=](const at::Tensor& x, const Inputs& in, const SavePolicy* s) {
    NormActOptions options;
    options.norm = norm;
    options.activation = activation;
    options.slope = 0.2;
    if (s) return linear(norm_act(linear(x, in[0], {}, *s), {in[1], in[2], {}, {}}, options, *s), in[3], {}, *s);
    const at::Tensor h = at::linear(x, in[0]);
    const at::Tensor y =
        norm == Norm::batch ? at::batch_norm(h, in[1], in[2], {}, {}, true, 0.1, 1e-5, false) : at::layer_norm(h, {channels}, in[1], in[2]);
    return at::linear(activation == Activation::relu ? at::relu(y) : at::leaky_relu(y, 0.2), in[3]);
  };
  return c;
}

WeightedChain image_chain() {
  at::manual_seed(32);
  WeightedChain c{"conv, batch, relu, conv", at::randn({20, 6, 8, 8}), at::randn({20, 4, 8, 8}), {}, {}};
  const Inputs weights = norm_leaves(16);
  c.leaves = {at::randn({16, 6, 3, 3}) / 7, weights[0], weights[1], at::randn({4, 16, 3, 3}) / 12};
  c.run = [](const at::Tensor& x, const Inputs& in, const SavePolicy* s) {
    ConvOptions padded;
    padded.padding = {1};
    if (s) return conv(relu(batch_norm(conv(x, in[0], {}, padded, *s), {in[1], in[2], {}, {}}, {}, *s), *s), in[3], {}, padded, *s);
    const at::Tensor y = at::batch_norm(at::conv2d(x, in[0], {}, 1, 1), in[1], in[2], {}, {}, true, 0.1, 1e-5, false);
    return at::conv2d(at::relu(y), in[3], {}, 1, 1);
  };
  return c;
}

std::vector<at::Tensor> gradients(const WeightedChain& c, at::ScalarType type, const SavePolicy* saving) {
  Inputs in;
  for (const at::Tensor& t : c.leaves) in.push_back(t.detach().to(type).requires_grad_());
  const at::Tensor out = c.run(c.x.to(type), in, saving);
  return gradients_of(at::mse_loss(out, c.target.to(type)), at::ones({}, type), in);
}

/// Of the mean of ⟨e_j, e_k⟩ over pairs of passes, which is the squared bias on average: how many standard deviations above what
/// float32's rounding (2^−18 of the gradient) explains.
double pair_z(const at::Tensor& errors, double gradient) {
  const at::Tensor products = errors.matmul(errors.t()).fill_diagonal_(0);
  const auto passes = static_cast<double>(errors.size(0));
  const double pairs = passes * (passes - 1);
  const double spread = std::sqrt(2 * products.square().sum().item<double>()) / pairs;
  const double above = products.sum().item<double>() / pairs - std::pow(std::ldexp(gradient, -18), 2);
  return spread > 0 ? above / spread : 0;
}

/// The largest z of the chain's gradients.
double worst_z(const WeightedChain& c, const std::string& method, std::string& which) {
  constexpr int kPasses = 60;
  const char* const names[] = {"weight before", "gamma", "beta", "weight after"};
  const SavePolicy saving{parse_method(method), "layer"};
  const std::vector<at::Tensor> want = gradients(c, at::kDouble, nullptr);
  std::vector<std::vector<at::Tensor>> errors(want.size());
  for (uint64_t pass = 0; pass < kPasses; ++pass) {
    at::Tensor seeds = at::empty({16}, at::kLong);
    for (uint32_t i = 0; i < 16; ++i) seeds[i] = static_cast<int64_t>(derive_seed(5, pass, 0, i));
    const SeedBank bank(seeds);
    const std::vector<at::Tensor> got = gradients(c, at::kFloat, &saving);
    for (size_t i = 0; i < want.size(); ++i) errors[i].push_back((got[i].to(at::kDouble) - want[i]).reshape({-1}));
  }
  double worst = -1e9;
  for (size_t i = 0; i < want.size(); ++i) {
    const double z = pair_z(at::stack(errors[i]), want[i].norm().item<double>());
    if (z > worst) worst = z, which = names[i];
  }
  return worst;
}

std::vector<WeightedChain> chains() {
  return {rows_chain("linear, batch, relu, linear; 4,096 rows", 4096, Norm::batch, Activation::relu),
          rows_chain("linear, batch, relu, linear; 300 rows", 300, Norm::batch, Activation::relu),
          rows_chain("linear, batch, leaky, linear", 512, Norm::batch, Activation::leaky_relu),
          rows_chain("linear, layer, relu, linear", 128, Norm::layer, Activation::relu), image_chain()};
}

/// 5 is exceeded by chance in one of 10^5 tensors or less, as each has hundreds of directions; γ and β have 16 and more.
TEST(WeightedChains, AreRightOnAverageBesidePlainTorch) {
  for (const WeightedChain& c : chains()) {
    for (const char* method : {"satchel", "satchel,bits=3", "satchel,side=both"}) {
      std::string which;
      const double z = worst_z(c, method, which);
      EXPECT_LE(z, 5) << c.name << ", " << method << ": " << which;
    }
  }
}

TEST(WeightedChains, AFixedOffValueIsFound) {
  for (const WeightedChain& c : {chains()[0], chains()[1], chains()[4]}) {
    std::string which;
    EXPECT_GT(worst_z(c, "satchel,off=mean", which), 5) << c.name;
    EXPECT_EQ(which, "weight before") << c.name;
  }
}

}  // namespace
}  // namespace satchel::test
