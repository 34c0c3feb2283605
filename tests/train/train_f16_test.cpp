// Training in 16 bits: when it is chosen by itself, the scale of gradients, where float16 ends, and that it learns.
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "satchel/train/graph_task.h"
#include "satchel/train/train.h"
#include "tests/train/train_common.h"

namespace satchel {
namespace {

using namespace train_test;

TEST_F(Train, AutomaticTakesFloat16WhereTf32RoundsAsMuch) {
  TrainOptions o = small("satchel", 2);
  o.device = "cuda";
  o.tf32 = true;
  const FeatureRange usual{true, 3};
  EXPECT_EQ(o.amp, Amp::automatic);
  EXPECT_EQ(amp_for(o, usual, "train"), Amp::fp16);
  for (const auto& [largest, expected] : {std::pair{0x1p-8f, Amp::fp16},
                                          {0x1p8f, Amp::fp16},
                                          {0x1.fffp-9f, Amp::none},
                                          {0x1.002p8f, Amp::none},
                                          {0.0f, Amp::none},
                                          {std::numeric_limits<float>::infinity(), Amp::none},
                                          {std::numeric_limits<float>::quiet_NaN(), Amp::none}})
    EXPECT_EQ(amp_for(o, {true, largest}, "train"), expected) << largest;
  EXPECT_EQ(amp_for(o, FeatureRange{}, "train"), Amp::none) << "sparse";
  const auto changed = [&](const std::function<void(TrainOptions&)>& change) {
    TrainOptions other = o;
    change(other);
    return amp_for(other, usual, "train");
  };
  for (const char* method : {"exact", "blockwise", "gact", "satchel,bits=3"})
    EXPECT_EQ(changed([&](TrainOptions& c) { c.method = parse_method(method); }), Amp::fp16) << method;
  for (const char* method : {"fp32", "satchel,bits=32", "projection"})
    EXPECT_EQ(changed([&](TrainOptions& c) { c.method = parse_method(method); }), Amp::none) << method;
  EXPECT_EQ(changed([](TrainOptions& c) { c.tf32 = false; }), Amp::none);
  EXPECT_EQ(changed([](TrainOptions& c) { c.device = "cpu"; }), Amp::none);
  EXPECT_EQ(changed([](TrainOptions& c) { c.shape.norm = Norm::none; }), Amp::none);
  EXPECT_EQ(changed([](TrainOptions& c) { c.shape.norm = Norm::layer; }), Amp::fp16);
  for (const GraphLayer& layer : graph_layers())
    EXPECT_EQ(changed([&](TrainOptions& c) { c.shape.conv = layer.name; }), layer.averages ? Amp::fp16 : Amp::none) << layer.name;
  for (const Amp amp : {Amp::none, Amp::bf16, Amp::fp16}) EXPECT_EQ(changed([&](TrainOptions& c) { c.amp = amp; }), amp);

  GraphData data = communities();
  data.features.dense[7] = -123.5f;
  EXPECT_EQ(range_of(data.features).largest, 123.5f);
  data.features.dense[9] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(range_of(data.features).largest));
}

TEST_F(Train, TheScaleOfGradientsFollowsTheLossAndTheMethod) {
  const GraphData data = communities();
  TrainOptions o = small("satchel", 2);
  o.shape = shape_for(data, o.shape);
  o.amp = Amp::fp16;
  GraphTask task = make_task(data, o);
  EXPECT_EQ(task.input.x.scalar_type(), at::kHalf);
  const auto rows = static_cast<double>(task.train.numel());
  const double scale = gradient_scale(task, o);
  EXPECT_LE(scale, rows);
  EXPECT_GT(2 * scale, rows);
  task.train = at::arange(100000);
  EXPECT_EQ(gradient_scale(task, o), 65536);
  task.kind = Task::multi_label;
  task.labels = at::zeros({100000, 3});
  EXPECT_EQ(gradient_scale(task, o), 262144);
  o.method = parse_method("fp32");
  EXPECT_EQ(gradient_scale(task, o), 4096) << "torch's own weight gradients are float16 too";
  o.amp = Amp::bf16;
  EXPECT_EQ(gradient_scale(task, o), 1);
}

TEST_F(Train, Float16EndsWhereItsRangeEnds) {
  GraphData data = communities();
  TrainOptions o = small("satchel", 3);
  o.amp = Amp::fp16;
  GraphData large = data;
  large.features.dense[5] = 1e5f;
  expect_refused([&] { train_graph(large, o); }, "[train] features in float16 (--amp fp16) must be at most 65504 in size, got 100000");
  o.checkpoint = file_;
  train_graph(data, o);
  expect_refused([&] { predict_graph(large, file_); },
                 "[predict] features in float16 (--amp fp16) must be at most 65504 in size, got 100000");
  o.checkpoint.clear();
  for (float& x : data.features.dense) x = 6e4f;  // 16 of them, times weights up to 1/4 and means: above 65504 in some channel
  expect_refused([&] { train_graph(data, o); }, "[train] loss and gradients must be finite (satchel; float16's range is small: --amp none");
}

/// A run that was begun in a type goes on in it, whatever `automatic` would take now.
TEST_F(Train, AutomaticResumesInTheCheckpointsType) {
  const GraphData data = communities();
  TrainOptions o = small("satchel", 6);
  o.amp = Amp::fp16;
  const double whole = train_graph(data, o).loss;
  o.checkpoint = file_;
  o.epochs = 3;
  train_graph(data, o);
  o.epochs = 6;
  o.resume = true;
  o.amp = Amp::automatic;
  const RunResult r = train_graph(data, o);
  EXPECT_EQ(r.amp, Amp::fp16);
  EXPECT_EQ(r.loss, whole);
  o.amp = Amp::none;
  expect_refused([&] { train_graph(data, o); }, "[resume] amp must be the checkpoint's, \"fp16\", got \"none\"");
}

TEST_F(Train, LearnsInHalves) {
  const GraphData data = communities();
  for (const auto& [conv, amp] : {std::pair{"sage", Amp::bf16}, {"gcn", Amp::bf16}, {"sage", Amp::fp16}, {"gcn", Amp::fp16}}) {
    for (const char* method : {"fp32", "exact", "blockwise", "satchel"}) {
      TrainOptions o = small(method, 40);
      o.shape.conv = conv;
      o.amp = amp;
      const RunResult r = train_graph(data, o);
      EXPECT_EQ(r.amp, amp);
      // Chance is 25 %: far above it, a model has learnt.
      EXPECT_GT(r.test, 70.0) << method;
      // A·X is kept in 16 bits, where a method caches it.
      EXPECT_EQ(r.cached_bytes, std::string(method) == "satchel" ? kNodes * kFeatures * 2 : 0) << method;
    }
  }
  TrainOptions o = small("satchel", 4);
  o.amp = Amp::bf16;
  o.checkpoint = file_;
  const RunResult r = train_graph(data, o);
  EXPECT_EQ(predict_graph(data, file_).test, r.test);
}

}  // namespace
}  // namespace satchel
