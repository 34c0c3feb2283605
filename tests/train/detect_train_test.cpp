// Runs of detectors on drawn scenes: they learn, resume bit for bit, and find what they are scored by.
#include "satchel/train/detect_train.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <string>

#include "satchel/core/error.h"
#include "satchel/data/scenes.h"
#include "tests/one_thread.h"

namespace satchel {
namespace {

const SceneSets& scenes() {
  static const SceneSets sets = load_scenes("synthetic-shapes:count=8,test=4,size=64,shapes=2,classes=2", SceneTask::detection);
  return sets;
}

DetectTrainOptions quick(const std::string& method) {
  DetectTrainOptions o;
  o.method = parse_method(method);
  o.width = 4;
  o.batch = 4;
  o.epochs = 2;
  o.loaders = 1;
  o.schedule = Decay::none;
  return o;
}

TEST(DetectTrain, LossFallsAndCostIsMeasured) {
  const test::OneThread one;
  DetectTrainOptions o = quick("satchel");
  o.epochs = 6;
  o.eval_every = 6;
  const RunResult r = train_detector(scenes(), o);
  ASSERT_EQ(r.curve.size(), 6U);
  EXPECT_LT(r.curve.back().loss, r.curve.front().loss);
  EXPECT_GT(r.saved_bytes, 0);
  EXPECT_GT(r.loss_bytes, 0);
  EXPECT_EQ(r.batch, 4);
  ASSERT_FALSE(r.more_scores.empty());
  EXPECT_EQ(r.more_scores.front().first, "ap");
  EXPECT_EQ(r.more_scores.front().second, r.test);
  DetectTrainOptions base = quick("fp32");
  base.epochs = 1;
  EXPECT_GT(train_detector(scenes(), base).saved_bytes, 4 * r.saved_bytes);
}

TEST(DetectTrain, ResumesBitForBitAndPredicts) {
  const test::OneThread one;
  const std::string file = testing::TempDir() + "satchel_detect.safetensors", part = testing::TempDir() + "satchel_detect_part.safetensors";
  for (const std::string& f : {file, part}) std::remove(f.c_str());
  DetectTrainOptions o = quick("satchel");
  o.sides = {48, 64};
  o.checkpoint = file;
  const RunResult whole = train_detector(scenes(), o);
  o.checkpoint = part;
  o.epochs = 1;
  train_detector(scenes(), o);
  o.epochs = 2;
  o.resume = true;
  const RunResult resumed = train_detector(scenes(), o);
  EXPECT_EQ(resumed.loss, whole.loss);
  EXPECT_EQ(resumed.test, whole.test);
  const FoundBoxes found = predict_boxes(scenes().test, true, file);
  EXPECT_EQ(found.scenes.size(), 4U);
  EXPECT_NEAR(100 * found.scores.ap, whole.test, 1e-9);
  o.longest = 200;
  EXPECT_THROW(train_detector(scenes(), o), Error);  // another run's checkpoint
  for (const std::string& f : {file, part}) std::remove(f.c_str());
}

TEST(DetectTrain, RefusesOptionsThatCannotBe) {
  const auto error = [](const DetectTrainOptions& o) {
    try {
      train_detector(scenes(), o);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  DetectTrainOptions o = quick("satchel");
  o.sides = {0};
  EXPECT_EQ(error(o), "[train] a side must be 1 to 8192, got 0");
  o = quick("satchel");
  o.batch = 9;
  EXPECT_EQ(error(o), "[train] batch must be at most the 8 scenes there are, got 9");
  o = quick("satchel");
  o.trainable = 7;
  EXPECT_EQ(error(o), "[train] stages to train must be 0 to 5, got 7");
}

}  // namespace
}  // namespace satchel
