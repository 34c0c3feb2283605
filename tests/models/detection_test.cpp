// Detectors: torchvision's names, shapes and numbers, written down here apart from our models; boxes by hand and by plain loops.
#include "satchel/models/detection.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "satchel/autograd/report.h"
#include "satchel/plan/bit_allocator.h"
#include "satchel/train/memory.h"
#include "tests/one_thread.h"
#include "tests/support.h"

namespace satchel {
namespace {

using Sizes = std::vector<int64_t>;
using State = std::map<std::string, Sizes>;

void add_conv(State& state, const std::string& name, int64_t in, int64_t out, int64_t kernel, bool bias) {
  state[name + ".weight"] = {out, in, kernel, kernel};
  if (bias) state[name + ".bias"] = {out};
}

void add_frozen(State& state, const std::string& name, int64_t channels) {
  for (const char* part : {".weight", ".bias", ".running_mean", ".running_var"}) state[name + part] = {channels};
}

/// torchvision's resnet50 under backbone.body, with FrozenBatchNorm2d, whose four numbers are buffers.
void add_body(State& state) {
  const std::string at = "backbone.body.";
  add_conv(state, at + "conv1", 3, 64, 7, false);
  add_frozen(state, at + "bn1", 64);
  int64_t in = 64, planes = 64;
  for (const auto& [layer, blocks] : {std::pair{1, 3}, {2, 4}, {3, 6}, {4, 3}}) {
    for (int block = 0; block < blocks; ++block) {
      const std::string name = at + "layer" + std::to_string(layer) + "." + std::to_string(block) + ".";
      add_conv(state, name + "conv1", in, planes, 1, false);
      add_conv(state, name + "conv2", planes, planes, 3, false);
      add_conv(state, name + "conv3", planes, 4 * planes, 1, false);
      add_frozen(state, name + "bn1", planes);
      add_frozen(state, name + "bn2", planes);
      add_frozen(state, name + "bn3", 4 * planes);
      if (block == 0) add_conv(state, name + "downsample.0", in, 4 * planes, 1, false);
      if (block == 0) add_frozen(state, name + "downsample.1", 4 * planes);
      in = 4 * planes;
    }
    planes *= 2;
  }
}

void add_pyramid(State& state, const std::vector<int64_t>& stages) {
  for (size_t i = 0; i < stages.size(); ++i) {
    add_conv(state, "backbone.fpn.inner_blocks." + std::to_string(i) + ".0", stages[i], 256, 1, true);
    add_conv(state, "backbone.fpn.layer_blocks." + std::to_string(i) + ".0", 256, 256, 3, true);
  }
}

State retinanet() {
  State state;
  add_body(state);
  add_pyramid(state, {512, 1024, 2048});
  for (const char* name : {"p6", "p7"}) add_conv(state, std::string("backbone.fpn.extra_blocks.") + name, 256, 256, 3, true);
  for (const char* head : {"classification_head", "regression_head"}) {
    for (int i = 0; i < 4; ++i) add_conv(state, "head." + std::string(head) + ".conv." + std::to_string(i) + ".0", 256, 256, 3, true);
  }
  add_conv(state, "head.classification_head.cls_logits", 256, 9 * 91, 3, true);
  add_conv(state, "head.regression_head.bbox_reg", 256, 9 * 4, 3, true);
  return state;
}

State faster_rcnn() {
  State state;
  add_body(state);
  add_pyramid(state, {256, 512, 1024, 2048});
  add_conv(state, "rpn.head.conv.0.0", 256, 256, 3, true);
  add_conv(state, "rpn.head.cls_logits", 256, 3, 1, true);
  add_conv(state, "rpn.head.bbox_pred", 256, 12, 1, true);
  const std::tuple<const char*, int64_t, int64_t> linears[] = {{"box_head.fc6", 256 * 49, 1024},
                                                               {"box_head.fc7", 1024, 1024},
                                                               {"box_predictor.cls_score", 1024, 91},
                                                               {"box_predictor.bbox_pred", 1024, 4 * 91}};
  for (const auto& [name, in, out] : linears) {
    state["roi_heads." + std::string(name) + ".weight"] = {out, in};
    state["roi_heads." + std::string(name) + ".bias"] = {out};
  }
  return state;
}

State state_of(const torch::nn::Module& model) {
  State state;
  for (const auto& item : model.named_parameters()) state[item.key()] = item.value().sizes().vec();
  for (const auto& item : model.named_buffers()) state[item.key()] = item.value().sizes().vec();
  return state;
}

int64_t parameters_of(const torch::nn::Module& model) {
  int64_t count = 0;
  for (const at::Tensor& p : model.parameters()) count += p.numel();
  return count;
}

/// Counts as torchvision's documentation has them, of models with frozen norms.
TEST(Detection, NamesShapesAndCountsAreTorchvisions) {
  DetectorOptions o;
  o.frozen_norm = true;
  o.trainable = 3;
  const Detector model = make_detector(o);
  EXPECT_EQ(state_of(*model), retinanet());
  EXPECT_EQ(parameters_of(*model), 34014999);
  int64_t frozen = 0;
  for (const at::Tensor& p : model->parameters()) frozen += p.requires_grad() ? 0 : p.numel();
  // conv1 and layer1: 3·64·49 + (64·64 + 64·64·9 + 64·256 + 64·256) + 2·(256·64 + 64·64·9 + 64·256)
  EXPECT_EQ(frozen, 9408 + 73728 + 2 * 69632);
  o.name = "fasterrcnn_resnet50_fpn";
  const Detector regions = make_detector(o);
  EXPECT_EQ(state_of(*regions), faster_rcnn());
  EXPECT_EQ(parameters_of(*regions), 41755286);
}

TEST(Boxes, AnchorsAreTorchvisions) {
  // Of 32 pixels at 1:2, 1:1 and 2:1: half of 32/√.5 is 22.6, of 32·√.5 is 11.3.
  const at::Tensor base = base_anchors({32}, {0.5, 1, 2});
  EXPECT_TRUE(at::equal(base, at::tensor({-23., -11., 23., 11., -16., -16., 16., 16., -11., -23., 11., 23.}).to(at::kFloat).view({3, 4})));
  const at::Tensor grid = grid_anchors(base, 2, 2, {8, 4});
  ASSERT_EQ(grid.size(0), 12);
  EXPECT_TRUE(at::equal(grid[0], base[0]));
  EXPECT_TRUE(at::equal(grid[4], at::tensor({4. - 16, -16., 4. + 16, 16.}).to(at::kFloat)));  // second column, second box
  EXPECT_TRUE(at::equal(grid[8], at::tensor({-11., 8. - 23, 11., 8. + 23}).to(at::kFloat)));  // second row, third box
}

TEST(Boxes, CodesAreCentresAndSizesByTheAnchors) {
  const at::Tensor anchors = at::tensor({0., 0., 10., 20.}).to(at::kFloat).view({1, 4});
  const at::Tensor boxes = at::tensor({5., 10., 10., 50.}).to(at::kFloat).view({1, 4});
  const at::Tensor codes = encode_boxes(boxes, anchors, kRegionCode);
  // Centre 7.5, 30 by 5, 10; sizes 5, 40 by 10, 20.
  const at::Tensor expected = at::tensor({10 * .25, 10 * 1., 5 * std::log(.5), 5 * std::log(2.)}).to(at::kFloat).view({1, 4});
  EXPECT_TRUE(at::allclose(codes, expected));
  EXPECT_TRUE(at::allclose(decode_boxes(codes, anchors, kRegionCode), boxes));
  const at::Tensor huge = decode_boxes(at::tensor({0., 0., 50., 0.}).to(at::kFloat).view({1, 4}), anchors);
  EXPECT_NEAR(huge[0][2].item<double>() - huge[0][0].item<double>(), 10 * 62.5, 1e-2);
  EXPECT_TRUE(at::equal(clip_boxes(at::tensor({-3., 2., 50., 60.}).to(at::kFloat).view({1, 4}), 40, 30)[0],
                        at::tensor({0., 2., 30., 40.}).to(at::kFloat)));
}

at::Tensor random_boxes(int64_t count, double side) {
  const at::Tensor corner = at::rand({count, 2}) * side, size = at::rand({count, 2}) * side / 2 + 1;
  return at::cat({corner, corner + size}, 1);
}

double overlap_by_hand(const at::Tensor& a, const at::Tensor& b) {
  const auto at_ = [](const at::Tensor& t, int64_t i) { return t[i].item<double>(); };
  const double w = std::min(at_(a, 2), at_(b, 2)) - std::max(at_(a, 0), at_(b, 0)),
               h = std::min(at_(a, 3), at_(b, 3)) - std::max(at_(a, 1), at_(b, 1));
  const auto area = [&](const at::Tensor& t) { return (at_(t, 2) - at_(t, 0)) * (at_(t, 3) - at_(t, 1)); };
  return w <= 0 || h <= 0 ? 0 : w * h / (area(a) + area(b) - w * h);
}

/// torchvision's rules, box by box.
TEST(Boxes, MatchingIsTheRulesBoxByBox) {
  at::manual_seed(1);
  const at::Tensor objects = random_boxes(5, 60), anchors = random_boxes(60, 60), overlap = overlaps(objects, anchors);
  std::vector<double> best_of_object(5, 0);
  for (int64_t g = 0; g < 5; ++g) {
    for (int64_t a = 0; a < 60; ++a) {
      EXPECT_NEAR(overlap[g][a].item<double>(), overlap_by_hand(objects[g], anchors[a]), 1e-6);
      best_of_object[static_cast<size_t>(g)] = std::max(best_of_object[static_cast<size_t>(g)], overlap[g][a].item<double>());
    }
  }
  for (const bool reaches_all : {false, true}) {
    const at::Tensor match = match_anchors(overlap, 0.5, 0.4, reaches_all);
    for (int64_t a = 0; a < 60; ++a) {
      int64_t best = 0;
      bool reached = false;
      for (int64_t g = 0; g < 5; ++g) {
        if (overlap[g][a].item<double>() > overlap[best][a].item<double>()) best = g;
        reached |= overlap[g][a].item<double>() == best_of_object[static_cast<size_t>(g)];
      }
      const double most = overlap[best][a].item<double>();
      const int64_t expected = most >= 0.5 || (reaches_all && reached) ? best : most >= 0.4 ? -2 : -1;
      EXPECT_EQ(match[a].item<int64_t>(), expected) << a;
    }
  }
  EXPECT_TRUE(match_anchors(at::zeros({0, 7}), 0.5, 0.4, true).eq(-1).all().item<bool>());
}

TEST(Boxes, SuppressionKeepsTheBestOfEachGroup) {
  const at::Tensor boxes =
      at::tensor({0., 0., 10., 10., 1., 0., 11., 10., 0., 0., 10., 10., 30., 30., 40., 40.}).to(at::kFloat).view({4, 4});
  const at::Tensor scores = at::tensor({.5, .9, .8, .1}).to(at::kFloat), groups = at::tensor({0, 0, 1, 0}, at::kLong);
  // 0 and 1 overlap by 9/11.
  EXPECT_TRUE(at::equal(suppress(boxes, scores, groups, 0.5), at::tensor({1, 2, 3}, at::kLong)));
  EXPECT_TRUE(at::equal(suppress(boxes, scores, groups, 0.9), at::tensor({1, 2, 0, 3}, at::kLong)));
  EXPECT_EQ(suppress(at::zeros({0, 4}), at::zeros({0}), at::zeros({0}, at::kLong), 0.5).size(0), 0);
}

// Whole models, small.

constexpr int64_t kClasses = 3, kSide = 64, kImages = 2;

DetectorOptions small(const std::string& name, const std::string& method, bool frozen) {
  DetectorOptions o;
  o.name = name;
  o.classes = kClasses;
  o.width = 8;
  o.frozen_norm = frozen;
  o.trainable = frozen ? 3 : 5;
  o.saving.method = parse_method(method);
  return o;
}

at::Tensor images() { return at::randn({kImages, 3, kSide, kSide}).contiguous(at::MemoryFormat::ChannelsLast); }

BoxTargets objects(bool second = true) {
  BoxTargets t;
  t.boxes = {at::tensor({4., 6., 40., 44., 20., 10., 60., 30.}).to(at::kFloat).view({2, 4}), at::zeros({0, 4})};
  t.labels = {at::tensor({1, 2}, at::kLong), at::zeros({0}, at::kLong)};
  if (second) t.boxes[1] = at::tensor({1., 1., 33., 62.}).to(at::kFloat).view({1, 4});
  if (second) t.labels[1] = at::tensor({1}, at::kLong);
  t.image_sizes = {{kSide, kSide}, {kSide, kSide}};
  return t;
}

double loss_of(Detector& model, const at::Tensor& x, const BoxTargets& t) {
  at::manual_seed(3);
  const at::Tensor loss = model->loss(model->forward(x, t), x, t);
  loss.backward();
  return loss.item<double>();
}

class Detectors : public testing::TestWithParam<std::string> {};

/// ‖a − b‖ / ‖b‖ over the gradients of all parameters.
double difference_of(const Detector& a, const Detector& b) {
  const auto wanted = b->named_parameters();
  double difference = 0, norm = 0;
  for (const auto& item : a->named_parameters()) {
    const at::Tensor &g = item.value().grad(), &e = wanted[item.key()].grad();
    EXPECT_EQ(g.defined(), e.defined()) << item.key();
    if (!g.defined() || !e.defined()) continue;
    difference += (g - e).to(at::kDouble).square().sum().item<double>();
    norm += e.to(at::kDouble).square().sum().item<double>();
  }
  return std::sqrt(difference / norm);
}

/// At 32 bits gradients are torch's. Norms of a batch divide by deviations of a few values, which makes rounding larger from layer to
/// layer, until values fall on the other side of a ReLU: how much that is, torch with maps in another order of memory tells, which rounds
/// as differently. A gradient that lacks a term is off by about 1.
TEST_P(Detectors, GradientsAreTorchsAt32Bits) {
  const test::OneThread one;
  for (const bool frozen : {false, true}) {
    const auto made = [&](const char* method) {
      at::manual_seed(1);
      return make_detector(small(GetParam(), method, frozen));
    };
    Detector own = made("bits=32"), base = made("fp32"), other = made("fp32");
    for (at::Tensor& p : other->parameters()) p.set_data(p.contiguous());
    at::manual_seed(2);
    const at::Tensor x = images();
    for (const bool second : {true, false}) {
      const BoxTargets t = objects(second);
      for (Detector* model : {&own, &base, &other}) (*model)->zero_grad();
      const double expected = loss_of(base, x, t);
      EXPECT_NEAR(loss_of(own, x, t), expected, 1e-4 * std::abs(expected)) << frozen;
      loss_of(other, x.contiguous(), t);
      const double rounding = difference_of(other, base);
      EXPECT_LE(difference_of(own, base), 4 * rounding + 1e-5) << "frozen norms " << frozen << ", torch's own rounding " << rounding;
      EXPECT_LE(rounding, 0.2);
    }
  }
}

std::vector<SavedTensor> without_losses(std::vector<SavedTensor> lines) {
  std::erase_if(lines, [](const SavedTensor& s) { return s.kind == "loss"; });
  return lines;
}

TEST(RetinaNet, KeepsWhatThePlanSays) {
  const test::OneThread one;
  for (const char* method : {"satchel", "actnn", "actnn,adaptive=no", "division", "int8", "bits=32"}) {
    for (const bool frozen : {false, true}) {
      const std::string where = std::string(method) + (frozen ? " frozen" : "");
      at::manual_seed(1);
      DetectorOptions o = small("retinanet_resnet50_fpn", method, frozen);
      const auto shares = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{kImages});
      shares->set_samples(std::vector<int64_t>{0, 1});
      o.saving.allocator = shares;
      Detector model = make_detector(o);
      const at::Tensor x = images();
      const BoxTargets t = objects();
      const std::vector<SavedTensor> plan =
          plan_detector(shape_of(model->options()), {kImages, kSide, kSide}, model->options().saving.method);
      const MemoryMeter meter(at::kCPU);
      DetectorOutputs outputs = model->forward(x, t);
      int64_t maps = 0;
      for (const at::Tensor& map : outputs.maps) maps += static_cast<int64_t>(map.nbytes());
      EXPECT_EQ(meter.allocated() - maps, total_bytes(plan)) << where;
      const at::Tensor loss = model->loss(std::move(outputs), x, t);
      const std::vector<SavedTensor> kept = without_losses(packed_tensors(loss));
      ASSERT_EQ(kept.size(), plan.size()) << where;
      for (size_t i = 0; i < kept.size(); ++i)
        ASSERT_TRUE(kept[i] == plan[i]) << where << ": kept " << test::text_of(kept[i]) << ", planned " << test::text_of(plan[i]);
    }
  }
}

/// The first half by sizes alone, the second by how many boxes there are.
TEST(FasterRcnn, KeepsWhatThePlansSay) {
  const test::OneThread one;
  for (const char* method : {"satchel", "actnn,adaptive=no", "int8", "bits=32"}) {
    at::manual_seed(1);
    Detector model = make_detector(small("fasterrcnn_resnet50_fpn", method, true));
    const at::Tensor x = images();
    const BoxTargets t = objects();
    const DetectorShape shape = shape_of(model->options());
    DetectorOutputs outputs = model->forward(x, t);
    const int64_t boxes = outputs.fixed[1].size(0);
    std::vector<SavedTensor> plan = plan_detector(shape, {kImages, kSide, kSide}, model->options().saving.method);
    const std::vector<SavedTensor> regions = plan_regions(shape, boxes, model->options().saving.method);
    plan.insert(plan.end(), regions.begin(), regions.end());
    std::vector<SavedTensor> kept = packed_tensors(model->loss(std::move(outputs), x, t));
    int64_t box_bytes = 0;
    for (const SavedTensor& s : kept) box_bytes += s.kind == "boxes" ? s.bytes : 0;
    EXPECT_EQ(box_bytes, boxes * (4 * 4 + 8)) << method;
    std::erase_if(kept, [](const SavedTensor& s) { return s.kind == "boxes"; });
    ASSERT_EQ(kept.size(), plan.size()) << method;
    for (size_t i = 0; i < kept.size(); ++i)
      ASSERT_TRUE(kept[i] == plan[i]) << method << ": kept " << test::text_of(kept[i]) << ", planned " << test::text_of(plan[i]);
  }
}

TEST_P(Detectors, FindsAtMostSoManyBoxesInsideTheImage) {
  const test::OneThread one;
  at::manual_seed(4);
  Detector model = make_detector(small(GetParam(), "fp32", false));
  model->eval();
  const auto found = model->detect(images(), {{60, 50}, {64, 64}}, 7);
  ASSERT_EQ(found.size(), 2U);
  for (const Detections& d : found) {
    EXPECT_LE(d.scores.numel(), 7);
    EXPECT_EQ(d.boxes.size(0), d.scores.numel());
    EXPECT_TRUE(d.scores.numel() < 2 || d.scores.slice(0, 1).le(d.scores.slice(0, 0, -1)).all().item<bool>());
  }
  if (found[0].scores.numel() > 0) {
    EXPECT_LE(found[0].boxes.select(1, 2).max().item<double>(), 50);
    EXPECT_LE(found[0].boxes.select(1, 3).max().item<double>(), 60);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Detectors, testing::Values("retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn"),
                         [](const auto& i) { return i.param; });

TEST(Detectors, RefuseWhatCannotBe) {
  const auto error = [](DetectorOptions o) {
    try {
      make_detector(o);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  DetectorOptions o;
  o.name = "yolo";
  EXPECT_TRUE(error(o).starts_with("[detector] a detector must be one of retinanet_resnet50_fpn")) << error(o);
  o = {};
  o.trainable = 6;
  EXPECT_EQ(error(o), "[detector] stages to train must be 0 to 5, got 6");
}

}  // namespace
}  // namespace satchel
