// Segmentation end to end, small: it learns, measures what the plan says, resumes bit for bit, predicts, and refuses what it should.
#include "satchel/train/segment_train.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>

#include "satchel/data/synthetic_shapes.h"
#include "satchel/plan/image_plan.h"
#include "satchel/train/image_options.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::error_of;

const SceneSets& scenes() {
  static const SceneSets sets = load_scenes("synthetic-shapes:count=24,size=32,shapes=2,classes=2,test=6", SceneTask::segmentation);
  return sets;
}

SegmentTrainOptions small(const std::string& method, int64_t epochs = 1) {
  SegmentTrainOptions o;
  o.method = parse_method(method);
  o.width = 8;
  o.epochs = epochs;
  o.batch = 8;
  o.lr = 0.02;
  o.seed = 3;
  return o;
}

class SegmentTrain : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { std::remove(file_.c_str()); }
  std::string file_ = testing::TempDir() + "satchel_segment_" + std::to_string(getpid()) + ".safetensors";
};

TEST_F(SegmentTrain, SavesWhatThePlanSays) {
  for (const char* method : {"fp32", "actnn", "division", "satchel"}) {
    const SegmentTrainOptions o = small(method);
    const RunResult r = train_segmentation(scenes(), o);
    EXPECT_TRUE(std::isfinite(r.loss)) << method;
    const auto plan = planned_saves(o, shape_of(o, 3, 3, 32, 32), 32, 32);
    // torch's first convolution keeps the images, which stand in any case.
    EXPECT_EQ(r.saved_bytes, total_bytes(plan) - (o.method.torch_baseline ? plan[0].bytes : 0)) << method;
    ASSERT_EQ(r.class_scores.size(), 3u);
    EXPECT_EQ(r.class_scores[0].first, "ground");
    EXPECT_EQ(r.epochs, 1);
  }
}

TEST_F(SegmentTrain, Learns) {
  SegmentTrainOptions o = small("satchel", 8);
  o.aux = false;
  o.least_scale = 0.75;
  o.most_scale = 1.25;
  std::vector<double> losses;
  const RunResult r = train_segmentation(scenes(), o, [&](const Progress& p) {
    if (p.step == 0) losses.push_back(p.loss);
    return true;
  });
  EXPECT_LT(losses.back(), 0.7 * losses.front()) << "24 steps";
  EXPECT_GT(r.class_scores[0].second, 50) << "most of a scene is ground";
}

TEST_F(SegmentTrain, ResumedRunsGoOnBitForBit) {
  for (const char* method : {"satchel", "actnn"}) {
    SegmentTrainOptions o = small(method, 2);
    o.class_weights = {0.5, 1, 2};
    const RunResult whole = train_segmentation(scenes(), o);
    o.checkpoint = file_;
    int reports = 0;
    train_segmentation(scenes(), o, [&](const Progress&) { return ++reports < 1; });  // stops in or after the first epoch
    o.resume = true;
    const RunResult resumed = train_segmentation(scenes(), o);
    EXPECT_EQ(whole.loss, resumed.loss) << method;
    EXPECT_EQ(whole.test, resumed.test) << method;
    EXPECT_EQ(resumed.epochs, 2);
    o.class_weights = {1, 1, 2};
    EXPECT_TRUE(test::holds(error_of([&] { train_segmentation(scenes(), o); }), "[resume] class_weights must be the checkpoint's"))
        << method;
    std::remove(file_.c_str());
  }
}

TEST_F(SegmentTrain, PredictsTheMasksThatWereScored) {
  SegmentTrainOptions o = small("satchel");
  o.model = "deeplabv3_resnet50";
  o.checkpoint = file_;
  const RunResult r = train_segmentation(scenes(), o);
  std::vector<int64_t> order;
  const SegmentPrediction p = predict_masks(scenes().test, file_, [&](int64_t index, const Mask& mask) {
    order.push_back(index);
    EXPECT_EQ(mask.classes.size(), size_t{32} * 32);
    EXPECT_EQ(mask.height, 32);
  });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4, 5}));
  // A pixel whose logits are nearly equal may fall the other way: torch convolves without gradients by other kernels. 6,144 pixels.
  EXPECT_NEAR(p.mean_iou, r.test, 0.5);
  EXPECT_EQ(p.class_names, (std::vector<std::string>{"ground", "disc", "square"}));
}

TEST_F(SegmentTrain, BadOptions) {
  const auto error = [](const auto& change) {
    SegmentTrainOptions o = small("satchel");
    change(o);
    return error_of([&] { train_segmentation(scenes(), o); });
  };
  EXPECT_EQ(error([](SegmentTrainOptions& o) { o.model = "resnet18"; }),
            "[train] scenes with masks need a model of segmentation, got resnet18");
  EXPECT_EQ(error([](SegmentTrainOptions& o) { o.class_weights = {1, 2}; }), "[train] class weights must be one a class, 3, got 2");
  EXPECT_EQ(error([](SegmentTrainOptions& o) {
              o.class_weights = {1, 2, -1};
            }),
            "[train] class weights must be finite and at least 0, got -1");
  EXPECT_EQ(error([](SegmentTrainOptions& o) { o.batch = 25; }), "[train] batch must be at most the 24 images there are, got 25");
  EXPECT_EQ(error([](SegmentTrainOptions& o) { o.least_scale = 0; }), "[train] scales must be above 0, rise, and be at most 16, got 0");
}

}  // namespace
}  // namespace satchel
