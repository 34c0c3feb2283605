// Runs of detectors on drawn scenes: they learn, resume bit for bit, and find what they are scored by.
#include "satchel/train/detect_train.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <string>

#include "satchel/core/error.h"
#include "satchel/data/scenes.h"
#include "satchel/models/detection.h"
#include "satchel/models/image_model.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/pretrained.h"
#include "satchel/train/safetensors.h"
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

TensorFile file_of(const TensorMap& state) {
  TensorFile file;
  for (const auto& [name, tensor] : state) {
    const bool counter = tensor.scalar_type() == at::kLong;
    const at::Tensor values = tensor.contiguous();
    const auto* bytes = static_cast<const std::byte*>(values.const_data_ptr());
    file.tensors.push_back({name, counter ? StoredType::i64 : StoredType::f32, values.sizes().vec(), {bytes, bytes + values.nbytes()}});
  }
  return file;
}

/// Of a ResNet alone, with the counters that frozen norms do not have; and of a detector of other classes, but for its classifier.
TEST(DetectTrain, StartsFromPretrainedWeights) {
  const test::OneThread one;
  const std::string resnet = testing::TempDir() + "satchel_detect_resnet.safetensors", run = testing::TempDir() + "satchel_detect_run.st";
  for (const std::string& f : {resnet, run}) std::remove(f.c_str());
  ImageModelOptions body;
  body.name = "resnet50";
  body.classes = 11;
  body.width = 4;
  const TensorMap theirs = weights_of(*make_image_model(body));
  write_safetensors(resnet, file_of(theirs));
  for (const char* model : {"retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn"}) {
    DetectTrainOptions o = quick("satchel");
    o.model = model;
    o.epochs = 1;
    o.frozen_norm = true;
    o.trainable = 3;
    o.weights = resnet;
    o.checkpoint = run;
    const RunResult r = train_detector(scenes(), o);
    for (const SavedTensor& line : r.tensors) {
      EXPECT_FALSE(line.name.starts_with("backbone.body.conv1") || line.name.starts_with("backbone.body.layer1")) << line.name;
    }
    const TensorMap ours = read_checkpoint(run, kDetectFormat).model;
    EXPECT_TRUE(at::equal(ours.at("backbone.body.layer1.0.conv1.weight"), theirs.at("layer1.0.conv1.weight"))) << model;
    EXPECT_TRUE(at::equal(ours.at("backbone.body.layer4.2.bn3.running_var"), theirs.at("layer4.2.bn3.running_var"))) << model;
    EXPECT_FALSE(at::equal(ours.at("backbone.body.layer4.0.conv1.weight"), theirs.at("layer4.0.conv1.weight"))) << model;

    DetectorOptions other;
    other.name = model;
    other.width = 4;
    other.frozen_norm = true;
    other.classes = 6;
    Detector fresh = make_detector(other);
    const ClassifierFit fit = load_weights(*fresh, shape_of(other), run);
    EXPECT_TRUE(fit.is_left_out());
    EXPECT_EQ(fit.stored, std::string(model).starts_with("retina") ? 2 : 3);
    EXPECT_TRUE(
        at::equal(fresh->named_parameters()["backbone.fpn.inner_blocks.0.0.weight"], ours.at("backbone.fpn.inner_blocks.0.0.weight")));
    other.frozen_norm = false;  // has counters, which may be missing
    Detector norms = make_detector(other);
    load_weights(*norms, shape_of(other), run);
    other.name = std::string(model).starts_with("retina") ? "fasterrcnn_resnet50_fpn" : "retinanet_resnet50_fpn";
    Detector wrong = make_detector(other);
    EXPECT_THROW(load_weights(*wrong, shape_of(other), run), Error);
    std::remove(run.c_str());
  }
  std::remove(resnet.c_str());
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
  o = quick("satchel");
  o.freeze = "layer2";
  EXPECT_EQ(error(o), "[train] a detector's stages are frozen by trainable (--trainable), not by name, got layer2");
  o = quick("satchel");
  o.weights = "/nowhere.safetensors";
  EXPECT_TRUE(error(o).starts_with("[weights] ")) << error(o);
}

}  // namespace
}  // namespace satchel
