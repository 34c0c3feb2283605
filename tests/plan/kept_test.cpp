// Plans against real models: the report of a training step must have the plan's lines, and the allocator the plan's bytes.
#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "satchel/autograd/loss.h"
#include "satchel/autograd/report.h"
#include "satchel/models/graph_model.h"
#include "satchel/models/image_model.h"
#include "satchel/plan/bit_allocator.h"
#include "satchel/plan/image_plan.h"
#include "satchel/train/memory.h"
#include "tests/one_thread.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::text_of;

using Lines = std::vector<SavedTensor>;

void expect_lines(const Lines& kept, const Lines& plan, const std::string& where) {
  for (size_t i = 0; i < std::min(kept.size(), plan.size()); ++i) {
    EXPECT_TRUE(kept[i] == plan[i]) << where << ": kept " << text_of(kept[i]) << ", planned " << text_of(plan[i]);
    if (!(kept[i] == plan[i])) return;
  }
  EXPECT_EQ(kept.size(), plan.size()) << where;
}

constexpr int64_t kNodes = 61, kEdges = 300;

Adjacency random_graph(const std::string& conv) {
  at::manual_seed(5);
  const Csr a = made_symmetric(csr_from_coo(at::randint(kNodes, {kEdges}), at::randint(kNodes, {kEdges}), kNodes, kNodes));
  return layer_adjacency(conv, a);
}

GraphInput features(int64_t width, bool sparse) {
  if (!sparse) return {at::randn({kNodes, width})};
  GraphInput input;
  input.sparse = adjacency(csr_from_coo(at::randint(kNodes, {kEdges}), at::randint(width, {kEdges}), kNodes, width));
  return input;
}

void expect_graph_plan(const GraphShape& shape, const std::string& name, bool sparse) {
  const Method method = parse_method(name);
  const Adjacency a = random_graph(shape.conv);
  const GraphInput input = features(shape.features, sparse);
  GraphModel model(GraphModelOptions{shape, method});
  model(input, a);  // what is made once stands
  const Lines plan = plan_graph(shape, kNodes, method, sparse);
  const std::string where =
      name + " " + shape.conv + " layers " + std::to_string(shape.layers) + " width " + std::to_string(shape.features) + "/" +
      std::to_string(shape.hidden) + " norm " + std::to_string(static_cast<int>(shape.norm)) + " activation " +
      std::to_string(static_cast<int>(shape.activation)) + " dropout " + std::to_string(shape.dropout) + (sparse ? " sparse" : "");
  const MemoryMeter meter(at::kCPU);
  at::Tensor logits = model(input, a);
  EXPECT_EQ(meter.allocated() - static_cast<int64_t>(logits.nbytes()), total_bytes(plan)) << where;
  if (method.torch_baseline) return;
  expect_lines(saved_tensors(logits), plan, where);
  cross_entropy_(logits, at::randint(shape.classes, {kNodes}), at::arange(30)).backward();
  EXPECT_TRUE(saved_tensors(logits).empty()) << where << ": backward lets go of all";
}

constexpr const char* kGraphMethods[] = {"fp32",
                                         "satchel",
                                         "satchel,bits=3",
                                         "satchel,bits=3,side=both",
                                         "satchel,side=none",
                                         "satchel,residual=1",
                                         "satchel,header=f32",
                                         "satchel,bits=32",
                                         "satchel,project=8",
                                         "gact",
                                         "bits=4,block=128",
                                         "exact",
                                         "blockwise",
                                         "blockwise,block=2rows",
                                         "projection",
                                         "actnn",
                                         "actnn,bits=3",
                                         "actnn,bits=8,header=f32",
                                         "actnn,block=16",
                                         "actnn,adaptive=no",
                                         "actnn,level=0",
                                         "actnn,level=1",
                                         "actnn,level=2"};

struct GraphPlanCase {
  std::string name;
  GraphShape shape;
  std::string method;
  bool sparse = false;
};
void PrintTo(const GraphPlanCase& p, std::ostream* out) { *out << p.name; }

class KeptByGraphs : public testing::TestWithParam<GraphPlanCase> {};

TEST_P(KeptByGraphs, IsThePlan) { expect_graph_plan(GetParam().shape, GetParam().method, GetParam().sparse); }

std::vector<GraphPlanCase> widths() {
  std::vector<GraphPlanCase> all;
  for (const std::string method : kGraphMethods) {
    all.push_back({"sage 1 " + method, {"sage", 2, 1, 1, 5}, method});
    all.push_back({"gcn 7 to 13 " + method, {"gcn", 3, 7, 13, 5}, method});
    all.push_back({"sage 33 to 130 " + method, {"sage", 3, 33, 130, 5}, method});
    all.push_back({"gcn 300 " + method, {"gcn", 2, 300, 300, 5}, method});
  }
  return all;
}

std::vector<GraphPlanCase> layers() {
  constexpr const char *kNorms[] = {"no norm", "batch", "layer"}, *kActivations[] = {"none", "relu", "leaky", "elu"};
  std::vector<GraphPlanCase> all;
  for (const std::string method : {"fp32", "satchel", "satchel,side=none", "gact", "exact", "projection", "actnn", "actnn,level=1"}) {
    for (const Norm norm : {Norm::none, Norm::batch, Norm::layer}) {
      for (const Activation activation : {Activation::none, Activation::relu, Activation::leaky_relu, Activation::elu}) {
        for (const double dropout : {0.0, 0.3}) {
          GraphShape shape{"sage", 2, 7, 13, 5, norm, activation};
          shape.dropout = dropout;
          all.push_back({std::string(kNorms[static_cast<size_t>(norm)]) + " " + kActivations[static_cast<size_t>(activation)] + " " +
                             (dropout > 0 ? "dropout " : "") + method,
                         shape, method});
        }
      }
    }
  }
  return all;
}

std::vector<GraphPlanCase> sparse_and_single() {
  std::vector<GraphPlanCase> all;
  for (const std::string method : kGraphMethods) {
    for (const std::string& conv : graph_layer_names()) {
      all.push_back({conv + " sparse " + method, {conv, 2, 40, 12, 5}, method, /*sparse=*/true});
      all.push_back({conv + " one layer " + method, {conv, 1, 9, 12, 5}, method});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Widths, KeptByGraphs, testing::ValuesIn(widths()), test::kCaseName);
INSTANTIATE_TEST_SUITE_P(Layers, KeptByGraphs, testing::ValuesIn(layers()), test::kCaseName);
INSTANTIATE_TEST_SUITE_P(SparseAndSingle, KeptByGraphs, testing::ValuesIn(sparse_and_single()), test::kCaseName);

constexpr int64_t kImages = 3;

void expect_image_plan(const std::string& name, const std::string& method, int64_t side, bool small_stem = true, double dropout = 0.25) {
  ImageModelOptions o;
  o.name = name;
  o.classes = 7;
  o.small_stem = small_stem;
  o.width = 16;
  o.dropout = dropout;
  o.saving.method = parse_method(method);
  if (allocates_bits(o.saving.method)) {  // as a run has it
    const auto shares = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{kImages});
    std::vector<int64_t> samples(kImages);
    std::iota(samples.begin(), samples.end(), 0);
    shares->set_samples(samples);
    o.saving.allocator = shares;
  }
  const Lines plan = plan_image(shape_of(o), {kImages, side, side}, o.saving.method);
  ImageModel model = make_image_model(o);
  const at::Tensor x = at::randn({kImages, 3, side, side}).contiguous(at::MemoryFormat::ChannelsLast);
  model->forward(x);  // what is made once stands
  const std::string where = name + ' ' + method + " side " + std::to_string(side);
  const MemoryMeter meter(at::kCPU);
  const at::Tensor logits = model->forward(x);
  const int64_t kept = meter.allocated() - static_cast<int64_t>(logits.nbytes());
  if (o.saving.method.torch_baseline) {
    EXPECT_EQ(kept, total_bytes(plan) - plan[0].bytes) << where << ": the images stood before";
    return;
  }
  expect_lines(saved_tensors(logits), plan, where);
  EXPECT_EQ(kept, total_bytes(plan)) << where;
}

constexpr const char* kImageMethods[] = {"fp32",
                                         "satchel",
                                         "satchel,bits=3,residual=1",
                                         "satchel,side=both",
                                         "satchel,side=none",
                                         "satchel,bits=32",
                                         "satchel,mean=2.5",
                                         "satchel,project=8",
                                         "gact",
                                         "bits=4,block=128",
                                         "exact",
                                         "blockwise",
                                         "projection",
                                         "division",
                                         "division,lowpass=4",
                                         "division,part=low",
                                         "division,part=high",
                                         "actnn",
                                         "actnn,bits=3,header=f32",
                                         "actnn,block=64",
                                         "actnn,adaptive=no",
                                         "actnn,level=0",
                                         "actnn,level=1",
                                         "actnn,level=2",
                                         "actnn,level=4"};

struct ImagePlanCase {
  std::string name, model, method;
  int64_t side;
  bool small_stem = true;
  double dropout = 0.25;
};
void PrintTo(const ImagePlanCase& p, std::ostream* out) { *out << p.name; }

class KeptByImages : public testing::TestWithParam<ImagePlanCase> {};

TEST_P(KeptByImages, IsThePlan) {
  const test::OneThread one;  // maps this small are slower on more
  const ImagePlanCase& p = GetParam();
  expect_image_plan(p.model, p.method, p.side, p.small_stem, p.dropout);
}

std::vector<ImagePlanCase> image_plans() {
  std::vector<ImagePlanCase> all;
  const auto add = [&](const std::string& model, const std::string& method, int64_t side, bool small_stem = true, double dropout = 0.25) {
    all.push_back({model + " " + method, model, method, side, small_stem, dropout});
  };
  for (const char* method : kImageMethods) add("resnet18", method, 12);
  for (const char* method : kImageMethods) add("vgg16", method, 32);  // no norms
  // Other models and odd sizes.
  for (const char* method : {"fp32", "satchel", "gact", "exact", "actnn"}) {
    add("resnet50", method, 21, false);
    add("vgg16_bn", method, 35);
  }
  for (const char* method : {"satchel", "actnn"}) add("densenet121", method, 29, false, 0);
  // SiLU, gates and stochastic depth; ReLU6, norms that a convolution reads; sums without a norm.
  for (const char* method : kImageMethods) add("efficientnet_b0", method, 12);
  for (const char* method : kImageMethods) add("mobilenet_v2", method, 11);
  for (const char* method : kImageMethods) add("preresnet56", method, 9);
  for (const char* method : {"fp32", "satchel", "division", "actnn"}) add("preresnet164", method, 8);
  return all;
}

INSTANTIATE_TEST_SUITE_P(, KeptByImages, testing::ValuesIn(image_plans()), test::kCaseName);

}  // namespace
}  // namespace satchel
