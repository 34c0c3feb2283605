// Chains with a weighted layer before the norm: gradients of all weights, on average over rounding, beside plain torch. What is expected
// contains nothing of the code. A norm's own input gradient is tested in the shared gradient test; errors that add up to nothing there
// may add up to something in the weights before it (docs/theory.md 10).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/core/noise.h"
#include "tests/autograd/gradient.h"
#include "tests/autograd/pairs.h"
#include "tests/one_thread.h"
#include "tests/support.h"

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
double worst_z(const WeightedChain& c, const std::string& method, std::string& which, uint64_t passes = 60) {
  const OneThread one_thread;
  const char* const names[] = {"weight before", "gamma", "beta", "weight after"};
  const SavePolicy saving{parse_method(method), "layer"};
  const std::vector<at::Tensor> want = gradients(c, at::kDouble, nullptr);
  std::vector<std::vector<at::Tensor>> errors(want.size());
  for (uint64_t pass = 0; pass < passes; ++pass) {
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

/// The pair between two layers with weights. Small: 60 passes of all of them take seconds.
WeightedChain pair_chain(const Pair& p) {
  constexpr int64_t kIn = 16, kOut = 6, kImageIn = 6, kSide = 6;
  at::manual_seed(33);
  const std::vector<int64_t> sizes = p.is_image()                ? std::vector<int64_t>{20, 8, kSide, kSide}
                                     : p.norm == PairNorm::batch ? std::vector<int64_t>{512, 32}
                                                                 : std::vector<int64_t>{128, 64};
  const int64_t channels = sizes[1];
  const std::vector<int64_t> shape = weight_sizes(p, sizes);
  const Inputs weights = norm_leaves(c10::multiply_integers(shape));
  WeightedChain c{name_of(p), {}, {}, {at::Tensor(), weights[0].view(shape), weights[1].view(shape), at::Tensor()}, {}};
  if (p.is_image()) {
    c.x = at::randn({sizes[0], kImageIn, kSide, kSide});
    c.target = at::randn({sizes[0], 4, kSide, kSide});
    c.leaves[0] = at::randn({channels, kImageIn, 3, 3}) / 7;
    c.leaves[3] = at::randn({4, channels, 3, 3}) / 12;
  } else {
    c.x = at::randn({sizes[0], kIn}).matmul(at::randn({kIn, kIn})) / 4;
    c.target = c.x.matmul(at::randn({kIn, kOut})) / 4;
    c.leaves[0] = at::randn({channels, kIn}) / 4;
    c.leaves[3] = at::randn({kOut, channels}) / 8;
  }
  c.run = [p](const at::Tensor& x, const Inputs& in, const SavePolicy* s) {
    ConvOptions padded;
    padded.padding = {1};
    const auto layer = [&](const at::Tensor& h, const at::Tensor& w) {
      if (s) return p.is_image() ? conv(h, w, {}, padded, *s) : linear(h, w, {}, *s);
      return p.is_image() ? at::conv2d(h, w, {}, 1, 1) : at::linear(h, w);
    };
    const at::Tensor h = layer(x, in[0]);
    return layer(s ? our_pair(p, h, in[1], in[2], *s) : torch_pair(p, h, in[1], in[2]), in[3]);
  };
  return c;
}

struct ChainCase {
  std::string name, method;
  std::function<WeightedChain()> make;
};

void PrintTo(const ChainCase& p, std::ostream* out) { *out << p.name << ' ' << p.method; }

std::string chain_name(const testing::TestParamInfo<ChainCase>& info) { return case_name(info.param.name + "_" + info.param.method); }

std::vector<ChainCase> own_chains(const std::vector<std::string>& methods) {
  const std::pair<const char*, std::function<WeightedChain()>> all[] = {
      {"batch_relu_4096_rows", [] { return rows_chain("", 4096, Norm::batch, Activation::relu); }},
      {"batch_relu_300_rows", [] { return rows_chain("", 300, Norm::batch, Activation::relu); }},
      {"batch_leaky", [] { return rows_chain("", 512, Norm::batch, Activation::leaky_relu); }},
      {"layer_relu", [] { return rows_chain("", 128, Norm::layer, Activation::relu); }},
      {"image_batch_relu", image_chain}};
  std::vector<ChainCase> cases;
  for (const auto& [name, make] : all) {
    for (const std::string& method : methods) cases.push_back({name, method, make});
  }
  return cases;
}

/// Layouts differ in what is read, not in what is coded, and dropout draws nothing that a code reads: `satchel bench bias --nets pairs`.
std::vector<ChainCase> pair_chains(const std::string& method) {
  std::vector<ChainCase> cases;
  for (const Pair& p : all_pairs()) {
    if (p.dropout == 0 && p.layout != PairLayout::nchw) cases.push_back({name_of(p), method, [p] { return pair_chain(p); }});
  }
  return cases;
}

class WeightedChains : public testing::TestWithParam<ChainCase> {};
class BiasedChains : public testing::TestWithParam<ChainCase> {};
class NearestChains : public testing::TestWithParam<ChainCase> {};

/// 5 is exceeded by chance in one of 10^5 tensors or less, as each has hundreds of directions; γ and β have 16 and more. Seeds are fixed.
TEST_P(WeightedChains, AreRightOnAverageBesidePlainTorch) {
  std::string which;
  EXPECT_LE(worst_z(GetParam().make(), GetParam().method, which), 5) << which;
}

TEST_P(BiasedChains, AFixedOffValueIsFound) {
  std::string which;
  EXPECT_GT(worst_z(GetParam().make(), GetParam().method, which), 5);
  EXPECT_EQ(which, "weight before");
}

/// An error that is the same in every pass: z of 10 of them is √(10·9/2) = 6.7.
TEST_P(NearestChains, RoundingWithoutChanceIsFound) {
  std::string which;
  EXPECT_GT(worst_z(GetParam().make(), GetParam().method, which, 10), 5);
}

INSTANTIATE_TEST_SUITE_P(, WeightedChains, testing::ValuesIn(own_chains({"satchel", "satchel,bits=3", "satchel,side=both"})), chain_name);
INSTANTIATE_TEST_SUITE_P(Pairs, WeightedChains, testing::ValuesIn(pair_chains("satchel")), chain_name);
INSTANTIATE_TEST_SUITE_P(, BiasedChains, testing::ValuesIn([] {
                           std::vector<ChainCase> cases = own_chains({"satchel,off=mean"});
                           std::erase_if(cases, [](const ChainCase& c) { return c.name == "batch_leaky" || c.name == "layer_relu"; });
                           return cases;
                         }()),
                         chain_name);
INSTANTIATE_TEST_SUITE_P(Pairs, NearestChains, testing::ValuesIn(pair_chains("satchel,round=nearest")), chain_name);

}  // namespace
}  // namespace satchel::test
