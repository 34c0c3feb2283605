// What every graph layer of the table must do: gradients are torch's, plans are exact, checkpoints come back.
#include <ATen/ops/arange.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <set>

#include "satchel/autograd/report.h"
#include "satchel/core/graph_layer.h"
#include "satchel/graph/layer.h"
#include "satchel/models/graph_model.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/memory.h"
#include "tests/train/train_common.h"

namespace satchel {
namespace {

using namespace train_test;

constexpr int64_t kRows = 101;
constexpr const char* kExactMethods[] = {"satchel,bits=32", "exact,bits=32,project=none", "fp32"};

Csr random_graph() {
  at::manual_seed(5);
  return without_self_loops(made_symmetric(csr_from_coo(at::randint(kRows, {400}), at::randint(kRows, {400}), kRows, kRows)));
}

/// The layer by torch's functions in float64, with A as a dense matrix.
at::Tensor reference(const GraphConvImpl& layer, const at::Tensor& x, const Adjacency& a) {
  const at::Tensor dense = multiply(a.matrix, at::eye(a.nodes())).to(at::kDouble);
  return layer.torch_forward(x, {[&](const at::Tensor& v) { return dense.matmul(v.to(at::kDouble)); }, at::kDouble});
}

/// A gradient is a sum of up to kRows terms of float32 after another: each is off by at most kRows·2^−24 of the terms' size.
void expect_near(const at::Tensor& got, const at::Tensor& want, const std::string& where) {
  ASSERT_EQ(got.sizes(), want.sizes()) << where;
  const double size = want.to(at::kDouble).norm().item<double>();
  EXPECT_GT(size, 0) << where;
  EXPECT_LE((got - want).to(at::kDouble).norm().item<double>(), 2 * kRows * 0x1p-24 * size) << where;
}

std::vector<at::Tensor> gradients(const at::Tensor& out, const std::vector<at::Tensor>& inputs) {
  at::manual_seed(8);
  return torch::autograd::grad({out}, inputs, {at::randn(out.sizes()).to(out.scalar_type())});
}

void expect_torchs_gradients(const std::string& name, const std::string& method, int64_t in, int64_t out) {
  const std::string where = name + ' ' + method + ' ' + std::to_string(in) + " to " + std::to_string(out) + ": ";
  const Adjacency a = layer_adjacency(name, random_graph());
  at::manual_seed(6);
  const auto layer = make_layer(name, {in, out, true, SavePolicy{parse_method(method), "convs.0"}});
  for (const at::Tensor& p : layer->parameters()) p.detach().add_(at::randn(p.sizes()), 0.1);  // some begin at 0
  const at::Tensor x = at::randn({kRows, in}).requires_grad_();
  std::vector<at::Tensor> inputs = layer->parameters();
  std::vector<std::string> names;
  for (const auto& p : layer->named_parameters()) names.push_back(p.key());
  inputs.push_back(x);
  names.emplace_back("x");

  const at::Tensor want = reference(*layer, x, a), got = layer->forward(x, a);
  expect_near(got.detach(), want.detach(), where + "output");
  const auto expected = gradients(want, inputs), own = gradients(got, inputs);
  for (size_t i = 0; i < own.size(); ++i) expect_near(own[i], expected[i], where + names[i]);

  inputs.pop_back();  // the data set needs none
  const GraphInput dense{x.detach()};
  GraphInput sparse;
  sparse.sparse = adjacency(csr_from_coo(at::arange(kRows * in).div(in, "floor"), at::arange(kRows * in).remainder(in), kRows, in,
                                         x.detach().reshape(-1).contiguous()));
  for (const GraphInput& input : {dense, with_aggregated(dense, a), with_aggregated(dense, a, kRows / 3), sparse}) {
    const std::vector<at::Tensor> of_data = gradients(layer->forward_data(input, a), inputs);
    for (size_t i = 0; i < of_data.size(); ++i) expect_near(of_data[i], expected[i], where + "data, " + names[i]);
  }
}

TEST(GraphLayers, GradientsAreTorchsAt32Bits) {
  for (const std::string& name : graph_layer_names()) {
    for (const char* method : kExactMethods) {
      expect_torchs_gradients(name, method, 12, 32);
      expect_torchs_gradients(name, method, 32, 12);
    }
  }
}

/// A layer that gives some nodes' outputs: those of the whole layer, and the gradients of a loss that reads these rows alone.
void expect_chosen_rows(const std::string& name, const std::string& method, int64_t in, int64_t out, const at::Tensor& nodes) {
  const std::string where =
      name + ' ' + method + ' ' + std::to_string(in) + " to " + std::to_string(out) + ", " + std::to_string(nodes.numel()) + " nodes: ";
  const Adjacency a = layer_adjacency(name, random_graph()), some = rows_for(a, nodes);
  at::manual_seed(6);
  const auto layer = make_layer(name, {in, out, true, SavePolicy{parse_method(method), "convs.0"}});
  for (const at::Tensor& p : layer->parameters()) p.detach().add_(at::randn(p.sizes()), 0.1);
  const at::Tensor x = at::randn({kRows, in}).requires_grad_();
  std::vector<at::Tensor> inputs = layer->parameters();
  inputs.push_back(x);
  const at::Tensor want = reference(*layer, x, a).index_select(0, nodes), got = layer->forward(x, some);
  expect_near(got.detach(), want.detach(), where + "output");
  const auto expected = gradients(want, inputs), own = gradients(got, inputs);
  for (size_t i = 0; i < own.size(); ++i) expect_near(own[i], expected[i], where + "gradient " + std::to_string(i));
  inputs.pop_back();
  GraphInput sparse;
  sparse.sparse = adjacency(csr_from_coo(at::arange(kRows * in).div(in, "floor"), at::arange(kRows * in).remainder(in), kRows, in,
                                         x.detach().reshape(-1).contiguous()));
  for (const GraphInput& input : {GraphInput{x.detach()}, sparse}) {
    const std::vector<at::Tensor> of_data = gradients(layer->forward_data(input, some), inputs);
    for (size_t i = 0; i < of_data.size(); ++i) expect_near(of_data[i], expected[i], where + "data, gradient " + std::to_string(i));
  }
  const at::NoGradGuard no_grad;
  expect_near(layer->forward(x, some), want, where + "without gradients");
}

TEST(GraphLayers, GiveTheRowsThatAreAskedFor) {
  // Most nodes, where the product comes before A, and few, where it comes after; in any order.
  const at::Tensor most = at::arange(kRows).slice(0, 5, kRows, 1), few = at::arange(kRows).slice(0, 2, kRows, 23).flip(0);
  for (const std::string& name : graph_layer_names()) {
    for (const char* method : kExactMethods) {
      for (const at::Tensor& nodes : {most, few}) {
        expect_chosen_rows(name, method, 12, 32, nodes);
        expect_chosen_rows(name, method, 32, 12, nodes);
      }
    }
  }
}

TEST(GraphLayers, AggregatesOfAllNodesDoNotServeSome) {
  const Adjacency a = layer_adjacency("sage", random_graph());
  const auto layer = make_layer("sage", {7, 5, true, {}});
  const GraphInput input = with_aggregated({at::randn({kRows, 7})}, a);
  expect_refused([&] { layer->forward_data(input, rows_for(a, at::arange(9))); }, "aggregated features must be made with this adjacency");
}

TEST(GraphLayers, AnAdjacencyOfSomeRowsSaysWhichTheyAre) {
  Adjacency a = rows_for(layer_adjacency("sage", random_graph()), at::arange(9));
  a.targets.reset();
  const auto layer = make_layer("sage", {5, 7, true, {}});
  expect_refused(
      [&] {
        layer->forward(at::randn({kRows, 5}), a);
      },
      "[sage] an adjacency must have a row a node, 101, or be rows_for() some, got 9");
}

TEST(GraphLayers, WithoutABiasToo) {
  for (const std::string& name : graph_layer_names()) {
    const Adjacency a = layer_adjacency(name, random_graph());
    const at::Tensor x = at::randn({kRows, 7});
    const auto with = make_layer(name, {7, 5, true, {}}), without = make_layer(name, {7, 5, false, {}});
    EXPECT_LT(without->parameters().size(), with->parameters().size()) << name;
    expect_near(without->forward(x, a).detach(), reference(*without, x, a).detach(), name);
    EXPECT_THROW(make_layer(name, {0, 5, true, {}}), Error) << name;
  }
}

TEST(GraphLayers, NothingIsKeptWithoutGradients) {
  const at::NoGradGuard no_grad;
  for (const std::string& name : graph_layer_names()) {
    const Adjacency a = layer_adjacency(name, random_graph());
    const auto layer = make_layer(name, {7, 5, true, {}});
    const at::Tensor x = at::randn({kRows, 7});
    const MemoryMeter meter(at::kCPU);
    const at::Tensor out = layer->forward(x, a);
    EXPECT_EQ(meter.allocated(), static_cast<int64_t>(out.nbytes())) << name;
  }
}

/// Lines and bytes of a whole model.
void expect_plan(const GraphShape& shape, const Method& method, bool sparse) {
  const std::string where = shape.conv + ' ' + method.name + " norm " + std::to_string(static_cast<int>(shape.norm)) + " layers " +
                            std::to_string(shape.layers) + (sparse ? " sparse" : "");
  const Adjacency a = layer_adjacency(shape.conv, random_graph());
  GraphInput input{at::randn({kRows, shape.features})};
  if (sparse) {
    input.x = at::Tensor();
    input.sparse = adjacency(csr_from_coo(at::randint(kRows, {300}), at::randint(shape.features, {300}), kRows, shape.features));
  }
  GraphModel model(GraphModelOptions{shape, method});
  model(input, a);  // what is made once stands
  const std::vector<SavedTensor> plan = plan_graph(shape, kRows, method, sparse);
  const MemoryMeter meter(at::kCPU);
  const at::Tensor logits = model(input, a);
  EXPECT_EQ(meter.allocated() - static_cast<int64_t>(logits.nbytes()), total_bytes(plan)) << where;
  if (is_baseline(method)) return;
  const std::vector<SavedTensor> kept = saved_tensors(logits);
  ASSERT_EQ(kept.size(), plan.size()) << where;
  for (size_t i = 0; i < plan.size(); ++i)
    EXPECT_TRUE(kept[i] == plan[i]) << where << ": kept " << kept[i].name << ' ' << kept[i].kind << ' ' << kept[i].bytes << ", planned "
                                    << plan[i].name << ' ' << plan[i].kind << ' ' << plan[i].bytes;
}

TEST(GraphLayers, PlannedBytesAreMeasuredForEveryPreset) {
  for (const std::string& name : graph_layer_names()) {
    int presets = 0;
    for (const MethodPreset& preset : method_presets()) {
      const Method method = parse_method(preset.name);
      try {
        validate_for_graph(method, "test");
      } catch (const Error&) {
        continue;  // a method of images
      }
      ++presets;
      for (const Norm norm : {Norm::batch, Norm::layer, Norm::none}) {
        for (const bool sparse : {false, true}) {
          expect_plan({name, 3, 20, 24, 7, norm}, method, sparse);
          expect_plan({name, 2, 33, 13, 5, norm, Activation::elu}, method, sparse);
          expect_plan({.conv = name, .layers = 3, .features = 9, .hidden = 12, .classes = 5, .norm = norm, .dropout = 0}, method, sparse);
        }
      }
      expect_plan({name, 1, 9, 12, 5}, method, false);
    }
    EXPECT_GE(presets, 6);
  }
}

TEST(GraphLayers, NamesAreWordsOfTheirOwn) {
  std::set<std::string_view> seen;
  for (const GraphLayer& layer : graph_layers()) {
    EXPECT_FALSE(layer.name.empty() || layer.title.empty());
    EXPECT_TRUE(seen.insert(layer.name).second) << layer.name;
    EXPECT_TRUE(is_graph_layer(layer.name));
    EXPECT_EQ(&graph_layer(layer.name, "test"), &layer);
  }
  EXPECT_FALSE(is_graph_layer("nosuch"));
  expect_refused([] { make_layer("nosuch", {7, 5, true, {}}); }, "[layer] model must be sage, gcn");
  GraphShape shape{"nosuch", 2, 7, 5, 3};
  expect_refused([&] { GraphModel(GraphModelOptions{shape}); }, "[graph_model] model must be sage, gcn");
}

TEST_F(Train, CheckpointsOfEveryLayerComeBack) {
  const GraphData data = communities();
  for (const std::string& name : graph_layer_names()) {
    TrainOptions o = small("satchel", 4);
    o.shape.conv = name;
    o.checkpoint = file_;
    const RunResult whole = train_graph(data, o);
    EXPECT_EQ(predict_graph(data, file_).test, whole.test) << name;
    const Checkpoint expected = read_checkpoint(file_);
    EXPECT_EQ(parse_options(expected.options).shape.conv, name);
    EXPECT_NE(expected.options.find("\"model\":\"" + name + "\""), std::string::npos) << expected.options;
    o.epochs = 2;
    train_graph(data, o);
    o.epochs = 4;
    o.resume = true;
    EXPECT_EQ(train_graph(data, o).loss, whole.loss) << name;
    const Checkpoint got = read_checkpoint(file_);
    ASSERT_EQ(got.model.size(), expected.model.size()) << name;
    for (const auto& [key, tensor] : expected.model) EXPECT_TRUE(tensor.equal(got.model.at(key))) << name << ' ' << key;
    for (const std::string& other : graph_layer_names()) {
      if (other == name) continue;
      o.shape.conv = other;
      expect_refused([&] { train_graph(data, o); }, "[resume] model must be the checkpoint's, \"" + name + "\", got \"" + other + "\"");
    }
    std::string unknown = expected.options;
    unknown.replace(unknown.find(name), name.size(), "nosuch");
    expect_refused([&] { parse_options(unknown); }, "[checkpoint] model must be sage, gcn");
  }
}

}  // namespace
}  // namespace satchel
