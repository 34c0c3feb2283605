// The guard that packs for models of torch's: bytes, rules, threads, errors.
#include "satchel/autograd/packing.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "satchel/autograd/linear.h"
#include "satchel/autograd/packing_fields.h"
#include "satchel/autograd/report.h"
#include "satchel/autograd/seeds.h"
#include "satchel/train/memory.h"
#include "tests/support.h"
#include "tests/torch_support.h"

namespace satchel::test {
namespace {

/// "node.field" → how it is kept; the last of several.
std::map<std::string, std::string> kept(const PackingReport& report) {
  std::map<std::string, std::string> all;
  for (const PackingLine& line : report.lines) all[line.node + "." + line.field] = line.kept;
  return all;
}

at::Tensor cross_entropy_of(const at::Tensor& logits) {
  return at::cross_entropy_loss(logits, at::arange(logits.size(0)).remainder(logits.size(1)));
}

torch::nn::Sequential conv_net() {
  using namespace torch::nn;
  return Sequential(Conv2d(Conv2dOptions(3, 16, 3).padding(1)), BatchNorm2d(16), ReLU(), Conv2d(Conv2dOptions(16, 32, 3).stride(2)),
                    BatchNorm2d(32), ReLU(), Flatten(), Linear(32 * 15 * 15, 10));
}

std::vector<at::Tensor> gradients(const torch::nn::Module& model) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : model.parameters()) all.push_back(p.grad().clone());
  return all;
}

double relative_error(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += (a[i] - b[i]).square().sum().item<double>();
    size += b[i].square().sum().item<double>();
  }
  return std::sqrt(error / size);
}

TEST(Packing, OfAConvNetKeepsFourTimesLess) {
  at::manual_seed(1);
  torch::nn::Sequential net = conv_net();
  const at::Tensor x = at::randn({16, 3, 32, 32});
  cross_entropy_of(net->forward(x)).backward();
  const auto exact = gradients(*net);
  net->zero_grad();
  const Packing packing;
  const at::Tensor loss = cross_entropy_of(net->forward(x));
  const PackingReport& report = packing.report();
  EXPECT_GE(report.before(), 4 * report.after()) << report;
  loss.backward();
  EXPECT_LT(relative_error(gradients(*net), exact), 0.5);
  const auto how = kept(report);
  EXPECT_EQ(how.at("ConvolutionBackward0.input"), "2 bits");
  EXPECT_EQ(how.at("ReluBackward0.result"), "mask");
  EXPECT_EQ(how.at("AddmmBackward0.mat1"), "2 bits");
  EXPECT_EQ(how.count("AddmmBackward0.mat2"), 0u) << "parameters stay, and do not count";
}

TEST(Packing, OfATransformerKeepsFourTimesLess) {
  at::manual_seed(1);
  torch::nn::TransformerEncoderLayerOptions layer(64, 4);
  layer.dim_feedforward(256).dropout(0).activation(torch::kGELU);
  torch::nn::TransformerEncoder net(torch::nn::TransformerEncoderOptions(torch::nn::TransformerEncoderLayer(layer), 2));
  const at::Tensor x = at::randn({32, 16, 64});
  net->forward(x).square().mean().backward();
  const auto exact = gradients(*net);
  net->zero_grad();
  const Packing packing;
  const at::Tensor loss = net->forward(x).square().mean();
  const PackingReport& report = packing.report();
  EXPECT_GE(report.before(), 4 * report.after()) << report;
  loss.backward();
  EXPECT_LT(relative_error(gradients(*net), exact), 0.5);
  EXPECT_EQ(kept(report).at("GeluBackward0.self"), "slope, 4 bits");
  EXPECT_EQ(kept(report).at("SoftmaxBackward0.result"), "8 bits");
}

TEST(Packing, LetsGoOfTheMemory) {
  at::manual_seed(1);
  torch::nn::Sequential net = conv_net();
  const at::Tensor x = at::randn({16, 3, 32, 32});
  const auto bytes_of = [&](bool packed) {
    const MemoryMeter meter(at::kCPU);
    std::optional<Packing> packing;
    if (packed) packing.emplace(PackingOptions{.report = false});
    const at::Tensor loss = cross_entropy_of(net->forward(x));
    return meter.allocated();
  };
  bytes_of(true);  // tables are made once
  const int64_t plain = bytes_of(false), packed = bytes_of(true);
  EXPECT_GT(plain, 4 * packed);
  // The other report counts the packed bytes too, from the graph alone.
  const Packing packing;
  const at::Tensor loss = cross_entropy_of(net->forward(x));
  const int64_t counted = total_bytes(saved_tensors(loss));
  EXPECT_LT(4 * counted, plain);
  EXPECT_NEAR(static_cast<double>(counted), static_cast<double>(packing.report().after()), 0.1 * static_cast<double>(counted));
}

TEST(Packing, LeavesNothingBehind) {
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
  {
    const Packing outer;
    EXPECT_TRUE(at::hasThreadLocalCallbacks());
    const Packing inner;
  }
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
  Packing packing;
  packing.stop();
  packing.stop();
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
  const at::Tensor w = leaf({64, 64}), x = at::randn({64, 64});
  at::mm(x, w).relu().sum().backward();
  EXPECT_TRUE(packing.report().lines.empty());
}

TEST(Packing, OfSeveralTheInnermostServes) {
  const at::Tensor w = leaf({64, 64}), x = at::randn({64, 64});
  const Packing outer;
  at::Tensor h = at::mm(x, w);
  {
    const Packing inner(PackingOptions{.local = 32, .flow = 32, .attention = 32});
    h = at::mm(h, w);
    EXPECT_EQ(kept(inner.report()).at("MmBackward0.self"), "exact: 32 bits");
  }
  EXPECT_EQ(outer.report().lines.size(), 1u);
  h = at::mm(h, w);
  EXPECT_EQ(outer.report().lines.size(), 2u) << outer.report();
  h.sum().backward();
}

TEST(Packing, RecordsNothingWithoutGradients) {
  const at::Tensor w = leaf({64, 64}), x = at::randn({64, 64});
  const Packing packing;
  {
    const at::NoGradGuard no_grad;
    at::mm(x, w).relu_();
  }
  at::mm(x, x).relu_();
  EXPECT_TRUE(packing.report().lines.empty());
}

TEST(Packing, KeepsSmallAndExpandedAndExcludedAsTheyAre) {
  const at::Tensor w = leaf({64, 64}), x = at::randn({64, 64});
  {
    const Packing packing(PackingOptions{.min_bytes = 64 * 64 * 4 + 1});
    at::mm(at::mm(x, w), w);
    EXPECT_EQ(kept(packing.report()).at("MmBackward0.self"), "exact: small");
    EXPECT_EQ(packing.report().before(), packing.report().after());
    EXPECT_EQ(kept(packing.report()).count("MmBackward0.mat2"), 0u) << "a parameter";
  }
  {
    const Packing packing(PackingOptions{.exclude = {"Mm*.self"}});
    at::mm(x, w).relu();
    EXPECT_EQ(kept(packing.report()).at("MmBackward0.self"), "exact: excluded");
    EXPECT_EQ(kept(packing.report()).at("ReluBackward0.result"), "mask");
  }
  {
    const Packing packing(PackingOptions{.include = {"ReluBackward0"}});
    at::mm(x, w).relu();
    EXPECT_EQ(kept(packing.report()).at("MmBackward0.self"), "exact: excluded");
    EXPECT_EQ(kept(packing.report()).at("ReluBackward0.result"), "mask");
  }
  const Packing packing;
  at::mm(at::randn({64, 1}).expand({64, 64}), w);
  EXPECT_EQ(kept(packing.report()).at("MmBackward0.self"), "exact: expanded");
  at::maximum(at::mm(x, w), x);
  EXPECT_EQ(kept(packing.report()).at("MaximumBackward0."), "exact: no row");
}

TEST(Packing, NamesNodesThatDoNotShowWhatTheySave) {
  const at::Tensor x = leaf({64, 64});
  const Packing packing;
  at::Tensor y = x * 2;
  y.select(0, 1).exp_();
  const at::Tensor z = (y.t().reshape({-1, 8}).chunk(2)[0] + 1).sum();
  EXPECT_EQ(packing.report().hidden, (std::map<std::string, int>{{"torch::autograd::CopySlices", 1}})) << packing.report();
}

TEST(Packing, KeepsParametersByReference) {
  const at::Tensor w = leaf({64, 64}), x = at::randn({64, 64});
  const Packing packing;
  const at::Tensor h = at::mm(at::mm(x, w.t()), w);  // a view of a parameter, and one itself
  for (const PackingLine& line : packing.report().lines) EXPECT_NE(line.field, "mat2");
  h.sum().backward();
  const at::Tensor again = at::mm(at::mm(x, w), w);
  {
    const at::NoGradGuard no_grad;
    w.add_(1);
  }
  EXPECT_THROW(again.sum().backward(), c10::Error) << "torch's own check of versions";
}

TEST(Packing, MakesCastsOfParametersAgain) {
  at::manual_seed(1);
  const at::Tensor w = leaf({64, 64}), x = leaf({64, 64});
  const auto run = [&] { return at::mm((x + 0).to(at::kBFloat16), w.to(at::kBFloat16).t()).sum(); };
  w.mutable_grad().reset();
  x.mutable_grad().reset();
  run().backward();
  const at::Tensor exact = x.grad().clone();
  x.mutable_grad().reset();
  const Packing packing;
  const at::Tensor loss = run();
  EXPECT_EQ(kept(packing.report()).at("MmBackward0.mat2"), "cast again");
  loss.backward();
  EXPECT_TRUE(at::equal(x.grad(), exact));
  const at::Tensor changed = run();
  {
    const at::NoGradGuard no_grad;
    w.add_(1);
  }
  EXPECT_EQ(error_of([&] { changed.backward(); }),
            "[packing] a parameter must stay as it is until backward, got one changed in place after autocast read it");
}

TEST(Packing, CountsCastsOfParametersThatItLeaves) {
  at::manual_seed(1);
  const at::Tensor w = leaf({64, 64}), x = leaf({64, 64});
  for (const PackingOptions& options : {PackingOptions{.min_bytes = 1 << 20}, PackingOptions{.exclude = {"*"}}}) {
    const Packing packing(options);
    const at::Tensor plain = at::mm(x + 0, w.t()), cast = at::mm((x + 0).to(at::kBFloat16), w.to(at::kBFloat16).t());
    // Three of the four operands: the parameter itself is in memory anyway, its cast is not.
    EXPECT_EQ(packing.report().lines.size(), 3U) << packing.report();
    EXPECT_EQ(packing.report().before(), static_cast<int64_t>(2 * x.nbytes())) << packing.report();
  }
}

TEST(Packing, LeavesErrorsOfInPlaceChangesToTorch) {
  const at::Tensor x = leaf({64, 64});
  {  // what stays exact
    const Packing packing(PackingOptions{.exclude = {"ExpBackward0"}});
    at::Tensor y = (x * 1).exp();
    y.add_(1);
    EXPECT_THROW(y.sum().backward(), c10::Error);
  }
  {  // what was changed before the guard could see it
    at::Tensor y;
    const Packing packing;
    {
      const at::DisableRecordFunctionGuard unseen;
      y = (x * 1).exp();
      y.add_(1);
    }
    const at::Tensor z = y + 1;
    EXPECT_EQ(kept(packing.report()).at("ExpBackward0.result"), "exact: changed in place");
    EXPECT_THROW(z.sum().backward(), c10::Error);
  }
  // What is packed already does not change with its tensor: the gradient is right.
  const Packing packing;
  at::Tensor y = at::relu(x * 1);
  y.mul_(0);
  (y + 1).sum().backward();
  EXPECT_EQ(x.grad().abs().max().item<float>(), 0);
}

TEST(Packing, SkipsWhatOthersHook) {
  struct Keep : torch::autograd::SavedVariableHooks {
    void call_pack_hook(const at::Tensor& t) override { value = t; }
    at::Tensor call_unpack_hook() override { return value; }
    at::Tensor value;
  };
  const at::Tensor w = leaf({64, 64}), x = at::randn({64, 64});
  const Packing packing;
  at::Tensor h;
  {
    const at::DisableRecordFunctionGuard unseen;
    h = at::mm(x, w);
  }
  for (const FieldRow* row : rows_of(*h.grad_fn())) {
    torch::autograd::SavedVariable& saved = *row->saved(*h.grad_fn());
    if (row->field == "self") saved.register_hooks(std::make_unique<Keep>());
  }
  const at::Tensor y = h.relu();
  EXPECT_EQ(kept(packing.report()).count("MmBackward0.self"), 0u);
  EXPECT_EQ(kept(packing.report()).count("ReluBackward0.result"), 1u);
  y.sum().backward();
  EXPECT_TRUE(at::allclose(w.grad(), x.t().mm(h.detach().gt(0).to(at::kFloat))));
}

TEST(Packing, ServesRetainGraphAndRefusesCreateGraph) {
  const at::Tensor w = leaf({64, 64}), v = leaf({64, 64}), x = at::randn({64, 64});
  const Packing packing;
  const at::Tensor loss = at::gelu(at::mm(at::gelu(at::mm(x, w)), v)).square().sum();
  loss.backward({}, /*retain_graph=*/true);
  const at::Tensor first = w.grad().clone();
  w.mutable_grad().reset();
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_TRUE(at::equal(first, w.grad()));
  EXPECT_EQ(error_of([&] { torch::autograd::grad({loss}, {w}, {}, true, /*create_graph=*/true); }),
            "[packing] a gradient of a gradient needs exact saves; leave the guard for it, got create_graph");
}

TEST(Packing, SharesACodeBetweenLocalReaders) {
  at::manual_seed(1);
  const at::Tensor q = leaf({64, 64}), k = leaf({64, 64}), x = at::randn({64, 64});
  const Packing packing;
  const at::Tensor h = at::relu(x);
  at::mm(h, q) + at::mm(h, k);
  ASSERT_EQ(packing.report().lines.size(), 2u);
  EXPECT_GT(packing.report().lines[0].after, 0);
  EXPECT_EQ(packing.report().lines[1].after, 0) << "the same code";
  at::Tensor a = at::mm(h, q), b;
  h.add_(1);
  b = at::mm(h, k);
  EXPECT_GT(packing.report().lines.back().after, 0) << "other values";
}

TEST(Packing, DrawsOfItsOwnForEverySaveAndFixedBySeeds) {
  const at::Tensor w = leaf({64, 64}), x = at::randn({64, 64});
  const auto run = [&] {
    w.mutable_grad().reset();
    const Packing packing;
    at::mm(x, w).square().sum().backward();
    return w.grad().clone();
  };
  EXPECT_FALSE(at::equal(run(), run()));
  const auto seeded = [&] {
    const SeedRun seeds(5);
    return run();
  };
  EXPECT_TRUE(at::equal(seeded(), seeded()));
}

TEST(Packing, ThreadsAreIndependent) {
  const at::Tensor x = at::randn({64, 64});
  std::vector<at::Tensor> gradients(2);
  std::vector<size_t> lines(2);
  const auto work = [&](size_t i) {
    const SeedRun seeds(5);
    const at::Tensor w = at::eye(64).requires_grad_();
    const Packing packing;
    for (int step = 0; step < 20; ++step) at::gelu(at::mm(x, w)).square().sum().backward();
    gradients[i] = w.grad();
    lines[i] = packing.report().lines.size();
  };
  {
    std::thread other(work, 1);
    work(0);
    other.join();
  }
  EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
  EXPECT_EQ(lines[0], lines[1]);
  std::thread unguarded([&] { EXPECT_FALSE(at::hasThreadLocalCallbacks()); });
  unguarded.join();
}

TEST(Packing, LeavesSatchelsFunctionsAlone) {
  at::manual_seed(1);
  const at::Tensor w = leaf({64, 64}), x = leaf({64, 64});
  const Packing packing;
  const at::Tensor h = satchel::linear(x, w, {}, saving_of("satchel"));
  EXPECT_TRUE(packing.report().lines.empty()) << packing.report();
  EXPECT_TRUE(packing.report().hidden.empty());
  at::relu(h).sum().backward();
}

TEST(Packing, RefusesOptionsThatDoNotFit) {
  EXPECT_EQ(error_of([] { Packing(PackingOptions{.local = 9}); }), "[packing] bits must be 1 to 8, or 32 for exact, got 9");
  EXPECT_EQ(error_of([] { Packing(PackingOptions{.min_bytes = -1}); }), "[packing] min_bytes must be 0 or more, got -1");
  const at::DisableRecordFunctionGuard off;
  EXPECT_TRUE(holds(error_of([] { Packing(); }), "[packing] torch's RecordFunction must be enabled"));
}

TEST(Packing, PrintsATable) {
  const at::Tensor w = leaf({64, 64}), x = at::randn({64, 64});
  const Packing packing;
  at::mm(x, w).relu();
  const std::string text = packing.report().text();
  EXPECT_TRUE(holds(text, "MmBackward0.self: 2 bits")) << text;
  EXPECT_TRUE(holds(text, "in all")) << text;
}

}  // namespace
}  // namespace satchel::test
