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

Adjacency random_graph(const std::string& conv) {
  at::manual_seed(5);
  const Csr a = made_symmetric(csr_from_coo(at::randint(kNodes, {kEdges}), at::randint(kNodes, {kEdges}), kNodes, kNodes));
  return layer_adjacency(conv, a);
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

GraphShape shape_of(const std::string& conv, Norm norm, Activation activation, double dropout) {
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
  for (const std::string& conv : graph_layer_names()) {
    for (const Norm norm : {Norm::batch, Norm::layer, Norm::none}) {
      for (const Activation activation : {Activation::relu, Activation::leaky_relu, Activation::elu, Activation::none}) {
        for (const double dropout : {0.5, 0.0}) {
          for (const char* method :
               {"satchel", "exact", "blockwise", "projection", "satchel,bits=32", "satchel,side=none", "gact", "fp32"}) {
            const GraphShape shape = shape_of(conv, norm, activation, dropout);
            const Measured got = measure(shape, method);
            const auto plan = plan_graph(shape, kNodes, parse_method(method));
            const auto where = testing::Message() << method << " conv " << conv << " norm " << int(norm) << " activation "
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
  const GraphShape shape = shape_of("sage", Norm::batch, Activation::relu, 0.5);
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
  const GraphShape shape = shape_of("sage", Norm::batch, Activation::relu, 0.5);
  const Adjacency a = random_graph(shape.conv), other = random_graph(shape.conv);
  GraphModel model(GraphModelOptions{shape, parse_method("satchel")});
  const GraphInput input{at::randn({kNodes, shape.features})};
  EXPECT_NO_THROW(model(with_aggregated(input, a), a));
  EXPECT_THROW(model(with_aggregated(input, a), other), Error);
  EXPECT_THROW(model(GraphInput{at::randn({kNodes, shape.features}).requires_grad_()}, a), Error);
}

/// X and A·X as columns of one matrix, as with_aggregated() gives them on a GPU.
GraphInput beside(const GraphInput& input, const Adjacency& a) {
  const int64_t width = input.x.size(1);
  const at::Tensor both = at::cat({input.x, multiply(a.matrix, input.x)}, 1);
  GraphInput placed{both.narrow(1, 0, width), {}, both.narrow(1, width, width)};
  placed.aggregated_by = AggregateSource(a.matrix, placed.x);
  EXPECT_TRUE(side_by_side(placed.x, placed.aggregated).defined());
  return placed;
}

/// One model's gradients for a method, the same weights every time.
std::vector<at::Tensor> gradients(const GraphShape& shape, const std::string& method, const GraphInput& input, const Adjacency& a,
                                  Amp amp = Amp::none, double scale = 1) {
  at::manual_seed(11);
  GraphModel model(GraphModelOptions{shape, parse_method(method), amp});
  at::manual_seed(12);
  const at::Tensor labels = at::randint(shape.classes, {kNodes});
  cross_entropy_(model->logits(input, a), labels, at::arange(100), "loss", scale).backward();
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : model->parameters()) all.push_back(p.grad() / scale);
  return all;
}

TEST(GraphModel, AlgebraGivesTorchsGradients) {
  for (const std::string& conv : graph_layer_names()) {
    const GraphShape shape = shape_of(conv, Norm::batch, Activation::relu, 0);
    const Adjacency a = random_graph(conv);
    at::manual_seed(3);
    const GraphInput plain{at::randn({kNodes, shape.features}), {}, {}};
    const auto want = gradients(shape, "fp32", plain, a);
    const GraphInput cached = with_aggregated(plain, a), part = with_aggregated(plain, a, kNodes / 3);
    const Csr rows =
        csr_from_coo(at::arange(kNodes * 20).div(20, "floor"), at::arange(kNodes * 20).remainder(20), kNodes, 20, plain.x.reshape(-1));
    const GraphInput sparse{{}, adjacency(rows), {}};
    const GraphInput both = beside(plain, a);
    for (const GraphInput* input : {&plain, &cached, &part, &sparse, &both}) {
      const auto got = gradients(shape, "satchel,bits=32", *input, a);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) {
        // Sums of float32 in another order: 2^−24 of about a thousand terms.
        EXPECT_LE((got[i] - want[i]).abs().max().item<double>(), 1e-4 * std::max(1e-2, want[i].abs().max().item<double>())) << i;
      }
    }
  }
}

/// A norm of the batch's own statistics takes off what a bias adds to all rows; one of rows or of running statistics does not.
TEST(GraphModel, ABiasBeforeABatchNormHasAGradientOfZero) {
  for (const std::string& conv : {std::string("sage"), std::string("gcn")}) {
    const Adjacency a = random_graph(conv);
    at::manual_seed(3);
    const GraphInput input{at::randn({kNodes, 20})};
    const auto first_bias = [&](Norm norm, const char* method, bool training, bool norm_trains = true) {
      const GraphShape shape = shape_of(conv, norm, Activation::relu, 0);
      at::manual_seed(11);
      GraphModel model(GraphModelOptions{shape, parse_method(method)});
      model->train(training);
      if (!norm_trains) model->named_modules()["norms.0"]->eval();  // as fine-tuning freezes statistics
      at::manual_seed(12);
      cross_entropy(model->logits(input, a), at::randint(shape.classes, {kNodes})).backward();
      return model->named_parameters()[conv == "sage" ? "convs.0.lin_l.bias" : "convs.0.bias"].grad();
    };
    EXPECT_TRUE(
        at::equal(first_bias(Norm::batch, "satchel,bits=32", true), at::zeros({shape_of(conv, Norm::batch, Activation::relu, 0).hidden})));
    struct Case {
      Norm norm;
      bool training, norm_trains;
    };
    const Case cases[] = {{Norm::batch, false, true}, {Norm::batch, true, false}, {Norm::layer, true, true}, {Norm::none, true, true}};
    for (const auto& [norm, training, norm_trains] : cases) {
      const at::Tensor want = first_bias(norm, "fp32", training, norm_trains);
      const at::Tensor got = first_bias(norm, "satchel,bits=32", training, norm_trains);
      EXPECT_GT(want.abs().max().item<double>(), 1e-4) << conv;
      EXPECT_LE((got - want).abs().max().item<double>(), 1e-4 * want.abs().max().item<double>()) << conv;
    }
  }
}

/// Every step of the way back is linear, and a power of two changes no mantissa.
TEST(GraphModel, AScaleOfGradientsIsExact) {
  for (const std::string& conv : graph_layer_names()) {
    const GraphShape shape = shape_of(conv, Norm::batch, Activation::relu, 0.5);
    const Adjacency a = random_graph(conv);
    at::manual_seed(3);
    const GraphInput input{at::randn({kNodes, shape.features}), {}, {}};
    for (const char* method : {"satchel", "exact", "blockwise", "satchel,bits=32"}) {
      const auto want = gradients(shape, method, input, a), got = gradients(shape, method, input, a, Amp::none, 0x1p17);
      for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << method << ", parameter " << i;
    }
  }
}

/// Gradients of a model in 16 bits are those of float32 within rounding: at 32 bits nothing else is lost.
TEST(GraphModel, HalvesGiveFloat32sGradientsWithinRounding) {
  for (const char* conv : {"sage", "gcn"}) {
    const GraphShape shape = shape_of(conv, Norm::batch, Activation::elu, 0);  // smooth: rounding turns no side of it over
    const Adjacency a = random_graph(conv);
    at::manual_seed(3);
    const GraphInput plain{at::randn({kNodes, shape.features}).to(at::kBFloat16).to(at::kFloat), {}, {}};
    const Csr rows =
        csr_from_coo(at::arange(kNodes * 20).div(20, "floor"), at::arange(kNodes * 20).remainder(20), kNodes, 20, plain.x.reshape(-1));
    const GraphInput cached = with_aggregated(plain, a), part = with_aggregated(plain, a, kNodes / 3), sparse{{}, adjacency(rows), {}};
    const GraphInput both = beside(plain, a);
    const auto want = gradients(shape, "fp32", plain, a);
    double largest = 0;
    for (const at::Tensor& g : want) largest = std::max(largest, g.norm().item<double>());
    for (const char* method : {"fp32", "satchel,bits=32", "exact,bits=32,project=none"}) {
      for (const GraphInput* input : {&plain, &cached, &part, &sparse, &both}) {
        for (const auto& [amp, unit, scale] : {std::tuple{Amp::bf16, 0x1p-8, 1.0}, {Amp::fp16, 0x1p-11, 64.0}}) {
          const auto got = gradients(shape, method, *input, a, amp, scale);
          ASSERT_EQ(got.size(), want.size());
          for (size_t i = 0; i < got.size(); ++i) {
            EXPECT_EQ(got[i].scalar_type(), at::kFloat);
            // Three layers of about eight roundings each way (tests/autograd/bf16.h), one unit each, added up as squares are: √48 = 6.93.
            // A bias before a norm has no gradient but the rounding of larger ones: of the largest at most a tenth of that.
            const double size = std::max(want[i].norm().item<double>(), 0.1 * largest);
            EXPECT_LE((got[i] - want[i]).norm().item<double>(), 6.93 * unit * size)
                << method << ", amp " << int(amp) << ", conv " << conv << ", parameter " << i;
          }
        }
      }
    }
  }
}

/// In 16 bits a model casts its weights once a step, into memory that stays.
TEST(GraphModel, CastsOfWeightsFollowThem) {
  for (const std::string& conv : graph_layer_names()) {
    const GraphShape shape = shape_of(conv, Norm::batch, Activation::relu, 0);
    const Adjacency a = random_graph(conv);
    at::manual_seed(3);
    const GraphInput input{at::randn({kNodes, shape.features})};
    const at::Tensor labels = at::randint(shape.classes, {kNodes});
    const auto made = [&] {
      at::manual_seed(11);
      return GraphModel(GraphModelOptions{shape, parse_method("satchel,bits=32"), Amp::bf16});
    };
    const auto gradients_of = [](GraphModel& model) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& p : model->parameters()) all.push_back(p.grad().clone());
      return all;
    };
    const auto train = [&](GraphModel& model) {
      model->zero_grad();
      cross_entropy(model->logits(input, a), labels).backward();
      return gradients_of(model);
    };
    const auto change = [](GraphModel& model) {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& p : model->parameters()) p.mul_(1.5);
    };
    const auto expect_equal = [&](const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want, const char* what) {
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << conv << ", " << what << ", parameter " << i;
    };
    GraphModel model = made();
    const int64_t bytes = model->reserve_casts();
    int64_t parameters = 0;
    for (const auto& layer : model->convs())
      for (const at::Tensor& p : layer->parameters()) parameters += p.numel();
    EXPECT_EQ(bytes, 2 * parameters);
    EXPECT_EQ(made()->reserve_casts(), bytes);
    {
      const c10::InferenceMode inference;  // whatever it makes serves no training
      model(input, a);
    }
    const std::vector<at::Tensor> first = train(model);
    change(model);
    GraphModel fresh = made();  // which has never cast the weights as they were
    change(fresh);
    expect_equal(train(model), train(fresh), "after a change");

    GraphModel again = made();
    again->zero_grad();
    const at::Tensor one = cross_entropy(again->logits(input, a), labels), two = cross_entropy(again->logits(input, a), labels);
    one.backward();
    expect_equal(gradients_of(again), first, "after a second forward pass");
    change(again);
    EXPECT_THROW(two.backward(), c10::Error) << conv << ": weights changed between forward and backward";
  }
  EXPECT_EQ(GraphModel(GraphModelOptions{shape_of("sage", Norm::batch, Activation::relu, 0)})->reserve_casts(), 0) << "float32";
}

/// By how much some steps lower the loss.
double gain(const GraphShape& shape, const char* method, Amp amp, const GraphInput& input, const Adjacency& a, const at::Tensor& labels) {
  at::manual_seed(21);
  GraphModel model(GraphModelOptions{shape, parse_method(method), amp});
  double first = 0, last = 0;
  for (int step = 0; step <= 12; ++step) {
    const at::Tensor logits = model(input, a);
    EXPECT_EQ(logits.scalar_type(), at::kFloat);
    const at::Tensor loss = cross_entropy_(logits, labels);
    last = loss.item<double>();
    if (step == 0) first = last;
    model->zero_grad();
    loss.backward();
    const at::NoGradGuard no_grad;
    for (const at::Tensor& p : model->parameters()) p.sub_(p.grad(), 0.2);
  }
  return first - last;
}

TEST(GraphModel, EveryMethodTrainsInBf16) {
  for (const char* conv : {"sage", "gcn"}) {
    const Adjacency a = random_graph(conv);
    at::manual_seed(4);
    const at::Tensor x = at::randn({kNodes, 20});
    const at::Tensor labels = multiply(a.matrix, x).matmul(at::randn({20, 7})).argmax(1);  // what a graph layer can learn
    for (const auto& [norm, activation] : {std::pair{Norm::batch, Activation::relu},
                                           {Norm::batch, Activation::leaky_relu},
                                           {Norm::batch, Activation::elu},
                                           {Norm::layer, Activation::relu},
                                           {Norm::none, Activation::relu}}) {
      if (std::string(conv) == "gcn" && norm != Norm::batch) continue;
      const GraphShape shape = shape_of(conv, norm, activation, 0.1);
      for (const char* method : {"satchel", "exact", "blockwise", "projection", "satchel,bits=32", "gact", "fp32"}) {
        const double wanted = gain(shape, method, Amp::none, {x}, a, labels), got = gain(shape, method, Amp::bf16, {x}, a, labels);
        // The same draws of noise, but for torch's own dropout: rounding moves a run a little; a broken gradient gains nothing, or loses.
        EXPECT_GT(wanted, 0.03);
        EXPECT_NEAR(got, wanted, 0.3 * wanted) << method << " conv " << conv << " norm " << int(norm) << " activation " << int(activation);
      }
    }
  }
}

TEST(GraphModel, NamesATypeThatIsNotDecided) {
  const GraphShape shape = shape_of("sage", Norm::batch, Activation::relu, 0.5);
  EXPECT_THROW(GraphModel(GraphModelOptions{shape, parse_method("satchel"), Amp::automatic}), Error);
}

TEST(GraphModel, Bf16EvaluatesWhatItTrained) {
  const GraphShape shape = shape_of("sage", Norm::batch, Activation::relu, 0.5);
  const Adjacency a = random_graph(shape.conv);
  const GraphInput input{at::randn({kNodes, shape.features}).to(at::kBFloat16).to(at::kFloat)};
  for (const char* method : {"satchel", "exact", "fp32"}) {
    at::manual_seed(9);
    GraphModel wide(GraphModelOptions{shape, parse_method(method)});
    at::manual_seed(9);
    GraphModel model(GraphModelOptions{shape, parse_method(method), Amp::bf16});
    wide->eval();
    model->eval();
    const at::NoGradGuard no_grad;
    const at::Tensor want = wide(input, a), got = model(input, a);
    EXPECT_EQ(got.scalar_type(), at::kFloat);
    // Three layers of about four roundings each: √12·2^−8.
    EXPECT_LE((got - want).norm().item<double>(), 0.0136 * want.norm().item<double>()) << method;
  }
}

}  // namespace
}  // namespace satchel
