// Every row of the policy table: C++ knows its node and field, and gradients are right, exactly where nothing is rounded and in the mean of
// many draws where something is. What Python tests in python/tests/test_unbiased.py.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "satchel/autograd/packing.h"
#include "satchel/autograd/packing_fields.h"
#include "satchel/autograd/packing_forms.h"
#include "satchel/autograd/seeds.h"
#include "tests/one_thread.h"
#include "tests/support.h"
#include "tests/torch_support.h"

namespace satchel::test {
namespace {

using Tensors = std::vector<at::Tensor>;

/// A function of leaves whose gradients are compared.
struct RowCase {
  std::string name;
  std::vector<std::string> rows;  // "node.field" that it packs
  std::function<Tensors()> leaves;
  std::function<at::Tensor(const Tensors&)> run;
  PackingOptions options = {.local = 2, .flow = 4, .attention = 8, .min_bytes = 0};
};

void PrintTo(const RowCase& c, std::ostream* out) { *out << c.name; }

/// A scalar that reads every value with a weight of its own.
at::Tensor weighted(const at::Tensor& y) {
  return (y.to(at::kFloat) * at::randn(y.sizes(), at::make_generator<at::CPUGeneratorImpl>(1))).sum();
}

using Function = std::function<at::Tensor(const at::Tensor&)>;

/// f after a layer with weights, so that f's input is an activation. What the layer itself keeps is not packed.
RowCase through(const std::string& name, std::vector<std::string> rows, at::IntArrayRef shape, Function f) {
  const int64_t width = shape.back();
  at::manual_seed(3);
  const at::Tensor x = at::randn(shape);
  RowCase c{name, std::move(rows),
            [=] {
              return Tensors{(at::randn({width, width}) / std::sqrt(width)).requires_grad_()};
            },
            [=](const Tensors& w) { return weighted(f(at::matmul(x, w[0]))); }};
  c.options.include = c.rows;
  return c;
}

/// … after a convolution.
RowCase after_conv(const std::string& name, std::vector<std::string> rows, bool last, Function f) {
  at::manual_seed(3);
  const at::Tensor x = at::randn({8, 8, 24, 24}).contiguous(last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
  RowCase c{name, std::move(rows),
            [] {
              return Tensors{(at::randn({32, 8, 3, 3}) / 8).requires_grad_()};
            },
            [=](const Tensors& w) { return weighted(f(at::conv2d(x, w[0], {}, 1, 1))); }};
  c.options.include = c.rows;
  return c;
}

/// … after a convolution of volumes.
RowCase after_conv3d(const std::string& name, std::vector<std::string> rows, Function f) {
  at::manual_seed(3);
  const at::Tensor x = at::randn({2, 4, 6, 12, 12});
  RowCase c{name, std::move(rows),
            [] {
              return Tensors{(at::randn({8, 4, 3, 3, 3}) / 8).requires_grad_()};
            },
            [=](const Tensors& w) { return weighted(f(at::conv3d(x, w[0], {}, 1, 1))); }};
  c.options.include = c.rows;
  return c;
}

Function operator_of(at::Tensor (*f)(const at::Tensor&)) { return f; }

void add_clamps(std::vector<RowCase>& all) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const auto add = [&](const std::string& name, std::optional<at::Scalar> low, std::optional<at::Scalar> high) {
    all.push_back(through(name, {"ClampBackward1.self"}, {64, 128}, [=](const at::Tensor& h) { return at::clamp(h, low, high); }));
  };
  add("clamp", -0.5, 0.25);
  add("clamp to whole numbers", 0, 1);
  add("clamp from below", 0.5, std::nullopt);
  add("clamp from above", std::nullopt, -0.1);
  add("clamp from minus infinity", -infinity, 0.25);
  add("clamp to infinity", 0.25, infinity);
  all.push_back(through("clamp with values at its ends", {"ClampBackward1.self"}, {64, 128},
                        [](const at::Tensor& h) { return at::clamp(at::relu(h), 0, std::nullopt); }));
  all.push_back(through("clamp of bf16", {"ClampBackward1.self"}, {64, 128},
                        [](const at::Tensor& h) { return at::clamp(h.to(at::kBFloat16), -0.3, 0.3); }));
}

void add_volumes(std::vector<RowCase>& all) {
  all.push_back(after_conv3d("max_pool3d", {"MaxPool3DWithIndicesBackward0.self", "MaxPool3DWithIndicesBackward0.result1"},
                             [](const at::Tensor& h) { return at::max_pool3d(h, {2}); }));
  all.push_back(after_conv3d("adaptive_max_pool3d", {"AdaptiveMaxPool3DBackward0.self", "AdaptiveMaxPool3DBackward0.result1"},
                             [](const at::Tensor& h) {
                               return std::get<0>(at::adaptive_max_pool3d(h, {2, 3, 3}));
                             }));
  all.push_back(after_conv3d("avg_pool3d", {"AvgPool3DBackward0.self"}, [](const at::Tensor& h) { return at::avg_pool3d(h, {2}); }));
  all.push_back(after_conv3d("adaptive_avg_pool3d", {"AdaptiveAvgPool3DBackward0.self"}, [](const at::Tensor& h) {
    return at::adaptive_avg_pool3d(h, {2, 3, 3});
  }));
}

void add_indices(std::vector<RowCase>& all) {
  const auto add = [&](const std::string& name, std::vector<std::string> rows, Function f) {
    all.push_back(through(name, std::move(rows), {64, 128}, std::move(f)));
  };
  all.push_back({"embedding",
                 {"EmbeddingBackward0.indices"},
                 [] {
                   return Tensors{leaf({1000, 8})};
                 },
                 [](const Tensors& t) {
                   return weighted(at::embedding(t[0], at::arange(2000).mul(7).remainder(1000).view({40, 50})));
                 }});
  all.back().options.include = all.back().rows;
  for (const int64_t dim : {0, 1, -1}) {
    const std::string along = " along " + std::to_string(dim);
    const int64_t size = dim == 0 ? 64 : 128;
    add("index_select" + along, {"IndexSelectBackward0.index"},
        [=](const at::Tensor& h) { return at::index_select(h, dim, at::arange(300).remainder(size)); });
    add("gather" + along, {"GatherBackward0.self", "GatherBackward0.index"}, [=](const at::Tensor& h) {
      return at::gather(h, dim, at::arange(64 * 128).mul(5).remainder(size).view({64, 128}));
    });
    add("max" + along, {"MaxBackward0.indices"}, [=](const at::Tensor& h) { return std::get<0>(at::max(h, dim)); });
    add("min" + along, {"MinBackward0.indices"}, [=](const at::Tensor& h) { return std::get<0>(at::min(h, dim)); });
    add("topk" + along, {"TopkBackward0.indices"}, [=](const at::Tensor& h) { return std::get<0>(at::topk(h, 9, dim)); });
    add("sort" + along, {"SortBackward0.indices"}, [=](const at::Tensor& h) { return std::get<0>(at::sort(h, dim)); });
  }
}

std::vector<RowCase> exact_cases() {
  std::vector<RowCase> all;
  const std::vector<int64_t> shape{64, 128};
  all.push_back(through("relu", {"ReluBackward0.result"}, shape, operator_of(at::relu)));
  all.push_back(through("leaky_relu", {"LeakyReluBackward0.self"}, shape, [](const at::Tensor& h) { return at::leaky_relu(h, 0.1); }));
  all.push_back(through("leaky_relu in place", {"LeakyReluBackward1.result"}, shape, [](const at::Tensor& h) {
    at::Tensor y = h * 1;
    return at::leaky_relu_(y, 0.1);
  }));
  all.push_back(through("threshold", {"ThresholdBackward0.self"}, shape, [](const at::Tensor& h) { return at::threshold(h, 0, -1); }));
  all.push_back(through("hardtanh", {"HardtanhBackward0.self"}, shape, [](const at::Tensor& h) { return at::hardtanh(h, -0.5, 0.25); }));
  all.push_back(through("relu6", {"HardtanhBackward0.self"}, shape, [](const at::Tensor& h) { return at::hardtanh(h * 4, 0, 6); }));
  all.push_back(through("hardsigmoid", {"HardsigmoidBackward0.self"}, shape, [](const at::Tensor& h) { return at::hardsigmoid(h * 3); }));
  all.push_back(through("dropout", {"NativeDropoutBackward0.result1"}, shape, [](const at::Tensor& h) {
    at::manual_seed(9);
    return std::get<0>(at::native_dropout(h, 0.3, true));
  }));
  all.push_back(through("masked_fill", {"MaskedFillBackward0.mask"}, shape,
                        [](const at::Tensor& h) { return h.masked_fill(h.detach().gt(1), 0.5); }));
  all.push_back(
      through("where", {"WhereBackward0.condition"}, shape, [](const at::Tensor& h) { return at::where(h.detach().gt(0), h, 2 * h); }));
  for (const bool last : {false, true}) {
    const std::string order = last ? "_channels_last" : "";
    all.push_back(after_conv("max_pool" + order, {"MaxPool2DWithIndicesBackward0.self", "MaxPool2DWithIndicesBackward0.result1"}, last,
                             [](const at::Tensor& h) { return at::max_pool2d(h, {3}, {2}, {1}); }));
    all.push_back(after_conv("adaptive_max_pool" + order, {"AdaptiveMaxPool2DBackward0.self", "AdaptiveMaxPool2DBackward0.result1"}, last,
                             [](const at::Tensor& h) {
                               return std::get<0>(at::adaptive_max_pool2d(h, {5, 5}));
                             }));
    all.push_back(
        after_conv("avg_pool" + order, {"AvgPool2DBackward0.self"}, last, [](const at::Tensor& h) { return at::avg_pool2d(h, {3}); }));
    all.push_back(after_conv("adaptive_avg_pool" + order, {"AdaptiveAvgPool2DBackward0.self"}, last, [](const at::Tensor& h) {
      return at::adaptive_avg_pool2d(h, {5, 5});
    }));
    all.push_back(after_conv("relu_of_maps" + order, {"ReluBackward0.result"}, last, operator_of(at::relu)));
  }
  const at::Tensor labels = at::arange(64).remainder(128), map = at::arange(8 * 24 * 24).remainder(32).view({8, 24, 24});
  all.push_back(through("nll", {"NllLossBackward0.self"}, shape, [=](const at::Tensor& h) { return at::nll_loss(h, labels); }));
  all.push_back(after_conv("nll2d", {"NllLoss2DBackward0.self"}, false, [=](const at::Tensor& h) { return at::nll_loss2d(h, map); }));
  add_clamps(all);
  add_volumes(all);
  add_indices(all);
  return all;
}

void add_products(std::vector<RowCase>& all) {
  const auto two = [](at::IntArrayRef a, at::IntArrayRef b) {
    const std::vector<int64_t> first = a.vec(), second = b.vec();
    return [=] { return Tensors{leaf(first), leaf(second)}; };
  };
  const auto of = [](const Tensors& t, size_t i) { return t[i] * 2; };  // no leaf, but computed
  const auto add = [&](const std::string& name, std::vector<std::string> rows, std::function<Tensors()> leaves,
                       std::function<at::Tensor(const Tensors&)> run) {
    RowCase c{name, std::move(rows), std::move(leaves), [run](const Tensors& t) { return weighted(run(t)); }};
    c.options.include = c.rows;
    all.push_back(c);
  };
  at::manual_seed(3);
  const at::Tensor x = at::randn({64, 96}), maps = at::randn({4, 8, 12, 12});
  add(
      "linear", {"AddmmBackward0.mat1"},
      [] {
        return Tensors{leaf({128, 96}), leaf({128}), leaf({64, 128}), leaf({64})};
      },
      [=](const Tensors& t) { return at::linear(at::linear(x, t[0], t[1]), t[2], t[3]); });
  add("mm", {"MmBackward0.self", "MmBackward0.mat2"}, two({64, 96}, {96, 64}),
      [=](const Tensors& t) { return at::mm(of(t, 0), of(t, 1)); });
  add("addmm", {"AddmmBackward0.mat1", "AddmmBackward0.mat2"}, two({64, 96}, {96, 64}),
      [=](const Tensors& t) { return at::addmm(at::ones({64}), of(t, 0), of(t, 1)); });
  add("bmm", {"BmmBackward0.self", "BmmBackward0.mat2"}, two({3, 32, 48}, {3, 48, 32}),
      [=](const Tensors& t) { return at::bmm(of(t, 0), of(t, 1)); });
  add("baddbmm", {"BaddbmmBackward0.batch1", "BaddbmmBackward0.batch2"}, two({3, 32, 48}, {3, 48, 32}),
      [=](const Tensors& t) { return at::baddbmm(at::ones({32}), of(t, 0), of(t, 1)); });
  add("conv", {"ConvolutionBackward0.input"}, two({8, 8, 3, 3}, {8, 8, 3, 3}),
      [=](const Tensors& t) { return at::conv2d(at::conv2d(maps, t[0]), t[1]); });
  add("conv of a computed weight", {"ConvolutionBackward0.input", "ConvolutionBackward0.weight"}, two({8, 8, 3, 3}, {8, 8, 3, 3}),
      [=](const Tensors& t) { return at::conv2d(at::conv2d(maps, of(t, 0)), of(t, 1)); });
  add("mul", {"MulBackward0.self", "MulBackward0.other"}, two({64, 96}, {64, 96}),
      [=](const Tensors& t) { return (t[0] + 1) * (t[1] + 2); });
  add("addcmul", {"AddcmulBackward0.tensor1", "AddcmulBackward0.tensor2"}, two({64, 96}, {64, 96}),
      [=](const Tensors& t) { return at::addcmul(t[0], of(t, 0), of(t, 1), 3); });
  add("div", {"DivBackward0.self"}, two({64, 96}, {64, 96}), [=](const Tensors& t) { return (t[0] + 1) / (t[1].square() + 1); });
}

void add_norms(std::vector<RowCase>& all) {
  const auto ones = [](int64_t n) { return at::ones({n}).add_(at::arange(n).remainder(3) * 0.1); };
  for (const bool last : {false, true}) {
    const std::string order = last ? "_channels_last" : "";
    all.push_back(after_conv("batch_norm" + order, {"NativeBatchNormBackward0.input"}, last, [=](const at::Tensor& h) {
      return std::get<0>(at::native_batch_norm(h, ones(32), ones(32), {}, {}, true, 0.1, 1e-5));
    }));
    all.push_back(after_conv("group_norm" + order, {"NativeGroupNormBackward0.input"}, last,
                             [=](const at::Tensor& h) { return at::group_norm(h, 4, ones(32), ones(32)); }));
  }
  all.push_back(after_conv("batch_norm_update", {"BatchNormWithUpdateBackward0.input"}, false, [=](const at::Tensor& h) {
    at::Tensor mean = at::zeros({32}), var = at::ones({32});
    return std::get<0>(at::_batch_norm_with_update(h, ones(32), ones(32), mean, var, 0.1, 1e-5));
  }));
  at::manual_seed(3);
  const at::Tensor x = at::randn({8, 32, 24, 24}) + 0.5;
  all.push_back({"batch_norm of running statistics",
                 {"NativeBatchNormBackward0.input"},
                 [] {
                   return Tensors{leaf({32}), leaf({32})};
                 },
                 [=](const Tensors& t) {
                   const at::Tensor h = x * t[1].view({32, 1, 1});
                   return weighted(std::get<0>(at::native_batch_norm(h, t[0], {}, at::zeros({32}), at::ones({32}), false, 0.1, 1e-5)));
                 }});
  all.back().options.include = all.back().rows;
  for (const int64_t width : {96, 256}) {  // blocks across rows, and within them
    all.push_back(through("layer_norm_" + std::to_string(width), {"NativeLayerNormBackward0.input"}, {64, width},
                          [=](const at::Tensor& h) { return at::layer_norm(h, {width}, ones(width), ones(width)); }));
  }
}

void add_losses(std::vector<RowCase>& all) {
  const auto add = [&](const std::string& name, const std::string& row, Function f) {
    all.push_back(through(name, {row}, {64, 128}, std::move(f)));
  };
  at::manual_seed(5);
  const at::Tensor flags = at::rand({64, 128}).round(), weight = at::rand({128}) * 5, target = at::randn({64, 128});
  const std::string logits = "BinaryCrossEntropyWithLogitsBackward0.self", l1 = "SmoothL1LossBackward0.self",
                    huber = "HuberLossBackward0.self";
  add("logits", logits,
      [=](const at::Tensor& h) { return at::binary_cross_entropy_with_logits(h * 4, flags, {}, {}, at::Reduction::Sum); });
  add("logits with weights", logits,
      [=](const at::Tensor& h) { return at::binary_cross_entropy_with_logits(h * 4, flags, weight, weight, at::Reduction::Mean); });
  add("smooth_l1", l1, [=](const at::Tensor& h) { return at::smooth_l1_loss(h, target, at::Reduction::Mean, 0.7); });
  add("smooth_l1 of two activations", l1,
      [=](const at::Tensor& h) { return at::smooth_l1_loss(h, h.flip(1) * 0.5, at::Reduction::Sum, 0.7); });
  add("huber", huber, [=](const at::Tensor& h) { return at::huber_loss(h, target, at::Reduction::Mean, 0.7); });
}

void add_curves(std::vector<RowCase>& all) {
  const auto add = [&](const std::string& name, const std::string& row, Function f) {
    all.push_back(through(name, {row}, {64, 128}, std::move(f)));
  };
  add("gelu", "GeluBackward0.self", [](const at::Tensor& h) { return at::gelu(h); });
  add("gelu_tanh", "GeluBackward0.self", [](const at::Tensor& h) { return at::gelu(h, "tanh"); });
  add("gelu of bf16", "GeluBackward0.self", [](const at::Tensor& h) { return at::gelu(h.to(at::kBFloat16)); });
  add("silu", "SiluBackward0.self", operator_of(at::silu));
  add("mish", "MishBackward0.self", operator_of(at::mish));
  add("hardswish", "HardswishBackward0.self", [](const at::Tensor& h) { return at::hardswish(h * 3); });
  add("elu", "EluBackward0.self", [](const at::Tensor& h) { return at::elu(h); });
  add("selu", "EluBackward0.self", operator_of(at::selu));
  add("softplus", "SoftplusBackward0.self", [](const at::Tensor& h) { return at::softplus(h, 2); });
  add("sigmoid", "SigmoidBackward0.result", operator_of(at::sigmoid));
  add("tanh", "TanhBackward0.result", operator_of(at::tanh));
  add("celu", "CeluBackward0.self", [](const at::Tensor& h) { return at::celu(h * 2, 0.6); });
  add("celu of 49", "CeluBackward0.self", [](const at::Tensor& h) { return at::celu(h * 40, 49); });  // 49 · (1 / 49) < 1
  add("square", "PowBackward0.self", [](const at::Tensor& h) { return h.pow(2); });
  add("cube", "PowBackward0.self", [](const at::Tensor& h) { return h.pow(3); });
  add("var", "VarBackward0.self", [](const at::Tensor& h) { return at::var(h, at::OptionalIntArrayRef({1})); });
  add("exp", "ExpBackward0.result", operator_of(at::exp));
  add("mse", "MseLossBackward0.self", [](const at::Tensor& h) { return at::mse_loss(h, at::zeros_like(h)); });
  add_losses(all);
  add("softmax", "SoftmaxBackward0.result", [](const at::Tensor& h) { return at::softmax(h, 1); });
  add("log_softmax", "LogSoftmaxBackward0.result", [](const at::Tensor& h) { return at::log_softmax(h, 1); });
}

std::vector<RowCase> noisy_cases() {
  std::vector<RowCase> all;
  add_products(all);
  add_norms(all);
  add_curves(all);
  const std::string attention = "ScaledDotProductFlashAttentionForCpuBackward0.";
  all.push_back(through("attention", {attention + "query", attention + "key", attention + "value", attention + "output"}, {2, 4, 32, 16},
                        [](const at::Tensor& h) { return at::scaled_dot_product_attention(h, 2 * h, h + 1); }));
  return all;
}

struct Gradient {
  at::Tensor values;  // of all leaves, one line
  PackingReport report;
};

Gradient gradient_of(const RowCase& c, bool packed) {
  at::manual_seed(7);
  const Tensors leaves = c.leaves();
  std::optional<Packing> packing;
  if (packed) packing.emplace(c.options);
  const at::Tensor loss = c.run(leaves);
  if (packing) packing->stop();
  loss.backward();
  Tensors parts;
  for (const at::Tensor& t : leaves) parts.push_back(t.grad().to(at::kDouble).flatten());
  return {at::cat(parts), packing ? packing->report() : PackingReport{}};
}

std::set<std::string> packed_rows(const PackingReport& report) {
  std::set<std::string> rows;
  for (const PackingLine& line : report.lines) {
    if (!line.kept.starts_with("exact")) rows.insert(line.node + "." + line.field);
  }
  return rows;
}

class ExactRows : public testing::TestWithParam<RowCase> {};
TEST_P(ExactRows, GiveTorchsGradients) {
  const RowCase& c = GetParam();
  const Gradient plain = gradient_of(c, false), packed = gradient_of(c, true);
  EXPECT_TRUE(at::equal(plain.values, packed.values));
  EXPECT_EQ(packed_rows(packed.report), std::set<std::string>(c.rows.begin(), c.rows.end())) << packed.report;
}
INSTANTIATE_TEST_SUITE_P(Packing, ExactRows, testing::ValuesIn(exact_cases()), kCaseName);

class NoisyRows : public testing::TestWithParam<RowCase> {};
TEST_P(NoisyRows, AreRightOnAverage) {
  const RowCase& c = GetParam();
  const OneThread one_thread;
  // The mean of N unbiased draws errs by 1/√N of what one does; where thousands of numbers are pooled the ratio is 1 ± a few per cent.
  constexpr int draws = 100;
  const at::Tensor right = gradient_of(c, false).values;
  at::Tensor sum = at::zeros_like(right);
  double squares = 0;
  std::set<std::string> rows;
  at::manual_seed(7);
  const Tensors leaves = c.leaves();
  for (int i = 0; i < draws; ++i) {
    at::Tensor loss;
    {
      const Packing packing(c.options);
      loss = c.run(leaves);
      if (i == 0) rows = packed_rows(packing.report());
    }
    for (const at::Tensor& t : leaves) t.mutable_grad().reset();
    loss.backward();
    Tensors parts;
    for (const at::Tensor& t : leaves) parts.push_back(t.grad().to(at::kDouble).flatten());
    const at::Tensor g = at::cat(parts);
    sum += g;
    squares += (g - right).square().sum().item<double>();
  }
  EXPECT_EQ(rows, std::set<std::string>(c.rows.begin(), c.rows.end()));
  const double error_of_mean = (sum / draws - right).norm().item<double>(), of_one = std::sqrt(squares / draws);
  EXPECT_GT(of_one, 0);
  EXPECT_LT(error_of_mean, 1.3 * of_one / std::sqrt(draws)) << "one draw errs by " << of_one / right.norm().item<double>();
}
INSTANTIATE_TEST_SUITE_P(Packing, NoisyRows, testing::ValuesIn(noisy_cases()), kCaseName);

TEST(PackingRows, AreThoseOfThePolicyFile) {
  const auto policy = nlohmann::json::parse(std::ifstream(SATCHEL_POLICY))["fields"];
  const auto rows = field_rows();
  ASSERT_EQ(rows.size(), policy.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& entry = policy[i];
    const std::string name = std::string(rows[i].node) + "." + std::string(rows[i].field);
    EXPECT_EQ(rows[i].node, entry["node"].get<std::string>());
    EXPECT_EQ(rows[i].field, entry["field"].get<std::string>());
    EXPECT_EQ(rows[i].edge, entry.value("edge", -1)) << name;
    EXPECT_EQ(rows[i].weight, entry.value("weight", false)) << name;
    EXPECT_NE(rows[i].type, nullptr) << name << ": this torch has no such node";
    EXPECT_NE(rows[i].saved, nullptr) << name << ": … no such field";
    EXPECT_EQ(rows[i].of != nullptr, entry.contains("of")) << name;
    EXPECT_EQ(rows[i].mean != nullptr, entry.contains("mean")) << name;
    EXPECT_EQ(rows[i].scale != nullptr, entry.contains("scale")) << name;
    EXPECT_EQ(rows[i].applies != nullptr, entry.contains("if")) << name;
    EXPECT_TRUE(rows[i].form != FieldForm::normed || rows[i].scale != nullptr) << name;
    EXPECT_EQ(rows[i].last, entry.value("last", 2)) << name;
    EXPECT_EQ(rows[i].places != nullptr, entry.contains("size")) << name;
    EXPECT_EQ(rows[i].dim != nullptr, entry.value("last", 2) == 0) << name;
    EXPECT_TRUE(rows[i].form != FieldForm::index || (rows[i].of != nullptr) != (rows[i].places != nullptr)) << name;
  }
}

TEST(PackingRows, AreAllTestedButThoseOfGpus) {
  std::set<std::string> tested{"LinearBackward0.input"};  // of backends other than CPU and CUDA
  for (const auto& cases : {exact_cases(), noisy_cases()}) {
    for (const RowCase& c : cases) tested.insert(c.rows.begin(), c.rows.end());
  }
  for (const FieldRow& row : field_rows()) {
    const std::string name = std::string(row.node) + "." + std::string(row.field);
    const bool of_gpus = name.starts_with("Cudnn") || name.starts_with("FusedRmsNorm") ||
                         (name.starts_with("ScaledDotProduct") && name.find("ForCpu") == std::string::npos);
    EXPECT_TRUE(of_gpus || tested.contains(name)) << name;
  }
}

/// Cases that a row cannot serve: the field stays exact, and the report says so.
TEST(PackingRows, LeaveOtherCasesExact) {
  const std::vector<int64_t> shape{64, 128};
  const at::Tensor row = at::randn({128});
  const std::vector<RowCase> cases{
      through("pow of another exponent", {"PowBackward0.self"}, shape, [](const at::Tensor& h) { return h.pow(4); }),
      through("elu with a step in its slope", {"EluBackward0.self"}, shape, [](const at::Tensor& h) { return at::elu(h, 0.5); }),
      through("celu of a negative alpha", {"CeluBackward0.self"}, shape, [](const at::Tensor& h) { return at::celu(h, -0.5); }),
      through("softplus with a step in its slope", {"SoftplusBackward0.self"}, shape,
              [](const at::Tensor& h) { return at::softplus(h, 3, 2); }),
      through("clamp to a point", {"ClampBackward1.self"}, shape, [](const at::Tensor& h) { return at::clamp(h, 1, 1); }),
      through("logits whose target needs a gradient", {"BinaryCrossEntropyWithLogitsBackward0.self"}, shape,
              [](const at::Tensor& h) { return at::binary_cross_entropy_with_logits(h, (h * 0.5).sigmoid()); }),
      through("huber of a target that is wider", {"HuberLossBackward0.self"}, shape,
              [=](const at::Tensor& h) { return at::huber_loss(h, row); }),
      through("smooth_l1 without an inside", {"SmoothL1LossBackward0.self"}, shape,
              [=](const at::Tensor& h) { return at::smooth_l1_loss(h, at::zeros_like(h), at::Reduction::Mean, 0); }),
  };
  for (const RowCase& c : cases) {
    const Gradient plain = gradient_of(c, false), packed = gradient_of(c, true);
    EXPECT_TRUE(at::equal(plain.values, packed.values)) << c.name;
    EXPECT_TRUE(packed_rows(packed.report).empty()) << c.name;
    bool told = false;
    for (const PackingLine& line : packed.report.lines)
      told |= line.node + "." + line.field == c.rows[0] && line.kept == "exact: this case";
    EXPECT_TRUE(told) << c.name << '\n' << packed.report;
  }
}

TEST(PackingRows, IndicesTakeTheFewestBits) {
  const auto text_of = [](const RowCase& c) {
    for (const PackingLine& line : gradient_of(c, true).report.lines) {
      if (line.kept.starts_with("index")) return line.kept;
    }
    return std::string("none");
  };
  std::map<std::string, std::string> texts;
  for (const RowCase& c : exact_cases()) texts[c.name] = text_of(c);
  EXPECT_EQ(texts["embedding"], "index, 10 bits");
  EXPECT_EQ(texts["max along 0"], "index, 6 bits");
  EXPECT_EQ(texts["sort along -1"], "index, 7 bits");
  EXPECT_EQ(texts["gather along 0"], "index, 6 bits");
  EXPECT_EQ(texts["gather along 1"], "index, 7 bits");
  EXPECT_EQ(texts["max_pool3d"], "index, 10 bits");  // 6 · 12 · 12 places
  EXPECT_EQ(texts["max_pool"], "index, 10 bits");    // 24 · 24
}

TEST(PackingRows, NormsWithoutAMean) {
  at::manual_seed(1);
  const at::Tensor x = at::randn({64, 96}), scale = x.square().mean(1, true).rsqrt();
  const KeptFormPtr form = keep_normed(x, {}, scale, 8, fresh_seed(at::kCPU));
  EXPECT_LT((form->restore() - x).abs().max().item<double>(), 0.05);
}

}  // namespace
}  // namespace satchel::test
