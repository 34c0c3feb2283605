// What a whole model keeps: the graph's own report, the allocator and the plan agree to the byte.
#include "satchel/models/graph_model.h"

#include <gtest/gtest.h>

#include "satchel/autograd/loss.h"
#include "satchel/autograd/report.h"
#include "satchel/core/error.h"
#include "satchel/train/memory.h"

namespace satchel {
namespace {

constexpr int64_t kNodes = 203, kEdges = 900;

Adjacency random_graph(Conv conv) {
  at::manual_seed(5);
  const Csr a = made_symmetric(csr_from_coo(at::randint(kNodes, {kEdges}), at::randint(kNodes, {kEdges}), kNodes, kNodes));
  return conv == Conv::gcn ? gcn_adjacency(a) : mean_adjacency(a);
}

struct Measured {
  int64_t saved;  // by the allocator
  std::vector<SavedTensor> lines;
};

Measured measure(const GraphShape& shape, const std::string& method) {
  const Adjacency a = random_graph(shape.conv);
  const GraphInput input{at::randn({kNodes, shape.features}), {}, {}};
  GraphModel model(GraphModelOptions{shape, parse_method(method)});
  model(input, a);  // what is made once stands
  const MemoryMeter meter(at::kCPU);
  const at::Tensor logits = model(input, a);
  return {meter.allocated() - static_cast<int64_t>(logits.nbytes()), saved_tensors(logits)};
}

GraphShape shape_of(Conv conv, Norm norm, Activation activation, double dropout) {
  GraphShape s;
  s.conv = conv;
  s.layers = 3;
  s.features = 20;
  s.hidden = 24;
  s.classes = 7;
  s.norm = norm;
  s.activation = activation;
  s.dropout = dropout;
  return s;
}

TEST(GraphModel, KeepsWhatThePlanSays) {
  for (const Conv conv : {Conv::sage, Conv::gcn}) {
    for (const Norm norm : {Norm::batch, Norm::layer, Norm::none}) {
      for (const Activation activation : {Activation::relu, Activation::leaky_relu, Activation::elu, Activation::none}) {
        for (const double dropout : {0.5, 0.0}) {
          for (const char* method :
               {"satchel", "exact", "blockwise", "projection", "satchel,bits=32", "satchel,side=none", "gact", "fp32"}) {
            const GraphShape shape = shape_of(conv, norm, activation, dropout);
            const Measured got = measure(shape, method);
            const auto plan = plan_graph(shape, kNodes, parse_method(method));
            const auto where = testing::Message() << method << " conv " << int(conv) << " norm " << int(norm) << " activation "
                                                  << int(activation) << " dropout " << dropout;
            EXPECT_EQ(got.saved, total_bytes(plan)) << where;
            if (std::string(method) == "fp32") continue;
            ASSERT_EQ(got.lines.size(), plan.size()) << where;
            for (size_t i = 0; i < plan.size(); ++i) {
              EXPECT_TRUE(got.lines[i] == plan[i])
                  << where << ": line " << i << " is " << got.lines[i].name << ' ' << got.lines[i].kind << ' ' << got.lines[i].bytes
                  << ", the plan has " << plan[i].name << ' ' << plan[i].kind << ' ' << plan[i].bytes;
            }
          }
        }
      }
    }
  }
}

TEST(GraphModel, EvaluationKeepsNothing) {
  const GraphShape shape = shape_of(Conv::sage, Norm::batch, Activation::relu, 0.5);
  const Adjacency a = random_graph(shape.conv);
  const GraphInput input{at::randn({kNodes, shape.features}), {}, {}};
  for (const char* method : {"satchel", "exact", "fp32"}) {
    GraphModel model(GraphModelOptions{shape, parse_method(method)});
    model->eval();
    const at::NoGradGuard no_grad;
    const MemoryMeter meter(at::kCPU);
    const at::Tensor logits = model(input, a);
    EXPECT_EQ(meter.allocated(), static_cast<int64_t>(logits.nbytes())) << method;
  }
}

TEST(GraphModel, RefusesFeaturesThatWantAGradientAndOthersAggregates) {
  const GraphShape shape = shape_of(Conv::sage, Norm::batch, Activation::relu, 0.5);
  const Adjacency a = random_graph(shape.conv), other = random_graph(shape.conv);
  GraphModel model(GraphModelOptions{shape, parse_method("satchel")});
  const GraphInput input{at::randn({kNodes, shape.features})};
  EXPECT_NO_THROW(model(with_aggregated(input, a), a));
  EXPECT_THROW(model(with_aggregated(input, a), other), Error);
  EXPECT_THROW(model(GraphInput{at::randn({kNodes, shape.features}).requires_grad_()}, a), Error);
}

/// One model's gradients for a method, the same weights every time.
std::vector<at::Tensor> gradients(const GraphShape& shape, const std::string& method, const GraphInput& input, const Adjacency& a) {
  at::manual_seed(11);
  GraphModel model(GraphModelOptions{shape, parse_method(method)});
  at::manual_seed(12);
  const at::Tensor labels = at::randint(shape.classes, {kNodes});
  cross_entropy_(model(input, a), labels, at::arange(100)).backward();
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : model->parameters()) all.push_back(p.grad());
  return all;
}

TEST(GraphModel, AlgebraGivesTorchsGradients) {
  for (const Conv conv : {Conv::sage, Conv::gcn}) {
    const GraphShape shape = shape_of(conv, Norm::batch, Activation::relu, 0);
    const Adjacency a = random_graph(conv);
    at::manual_seed(3);
    const GraphInput plain{at::randn({kNodes, shape.features}), {}, {}};
    const auto want = gradients(shape, "fp32", plain, a);
    const GraphInput cached = with_aggregated(plain, a);
    const Csr rows =
        csr_from_coo(at::arange(kNodes * 20).div(20, "floor"), at::arange(kNodes * 20).remainder(20), kNodes, 20, plain.x.reshape(-1));
    const GraphInput sparse{{}, adjacency(rows), {}};
    for (const GraphInput* input : {&plain, &cached, &sparse}) {
      const auto got = gradients(shape, "satchel,bits=32", *input, a);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) {
        // Sums of float32 in another order: 2^−24 of about a thousand terms.
        EXPECT_LE((got[i] - want[i]).abs().max().item<double>(), 1e-4 * std::max(1e-2, want[i].abs().max().item<double>())) << i;
      }
    }
  }
}

}  // namespace
}  // namespace satchel
