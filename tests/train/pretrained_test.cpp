// Weights from elsewhere, and frozen stages: what is loaded, what is refused, what is kept, and that a run goes on.
#include "satchel/train/pretrained.h"

#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "satchel/autograd/report.h"
#include "satchel/core/error.h"
#include "satchel/data/synthetic_images.h"
#include "satchel/models/image_model.h"
#include "satchel/plan/bit_allocator.h"
#include "satchel/plan/image_plan.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/image_train.h"
#include "satchel/train/memory.h"
#include "satchel/train/safetensors.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::error_of;
using test::text_of;

constexpr int64_t kWidth = 8, kClasses = 4;

ImageModelOptions options_of(const std::string& name, const std::string& method = "satchel", const std::string& freeze = "") {
  ImageModelOptions o;
  o.name = name;
  o.classes = kClasses;
  o.small_stem = true;
  o.width = kWidth;
  o.saving.method = parse_method(method);
  o.freeze = freeze;
  return o;
}

StoredTensor stored(const std::string& name, const at::Tensor& t, StoredType type) {
  const at::Tensor values = t.contiguous();
  const auto* first = static_cast<const std::byte*>(values.const_data_ptr());
  return {name, type, values.sizes().vec(), {first, first + values.nbytes()}};
}

/// A model's state dict as Python's safetensors writes it.
TensorFile file_of(const ImageModel& model, at::ScalarType type = at::kFloat) {
  const StoredType floats = type == at::kFloat ? StoredType::f32 : type == at::kHalf ? StoredType::f16 : StoredType::bf16;
  TensorFile file;
  for (const auto& [name, t] : weights_of(*model)) {
    const bool counter = t.scalar_type() == at::kLong;
    file.tensors.push_back(stored(name, counter ? t : t.to(type), counter ? StoredType::i64 : floats));
  }
  return file;
}

const ImageSets& data() {
  static const ImageSets sets = [] {
    SyntheticImageOptions o;
    o.classes = kClasses;
    o.size = 16;
    o.count = 96;
    o.test = 32;
    return make_synthetic_images(o);
  }();
  return sets;
}

ImageTrainOptions small(const std::string& method, int64_t epochs = 1) {
  ImageTrainOptions o;
  o.method = parse_method(method);
  o.width = kWidth;
  o.epochs = epochs;
  o.batch = 32;
  o.lr = 0.05;
  o.seed = 3;
  return o;
}

class Pretrained : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    at::manual_seed(5);
  }
  void TearDown() override {
    for (const std::string& file : {file_, run_}) std::remove(file.c_str());
  }
  /// What loading the file into a fresh model says.
  std::string load_error(const TensorFile& file, const std::string& name = "resnet18") {
    write_safetensors(file_, file);
    ImageModel model = make_image_model(options_of(name));
    std::string text = error_of([&] { load_weights(*model, shape_of(options_of(name)), file_); });
    for (size_t at = text.find(file_); at != std::string::npos; at = text.find(file_)) text.replace(at, file_.size(), "F");
    return text;
  }

  const std::string file_ = testing::TempDir() + "satchel_weights_" + std::to_string(getpid()) + ".safetensors";
  const std::string run_ = testing::TempDir() + "satchel_weights_run_" + std::to_string(getpid()) + ".safetensors";
};

TEST_F(Pretrained, EveryModelTakesItsOwnStateDict) {
  for (const char* name : {"resnet18", "vgg16_bn", "densenet121", "mobilenet_v2", "efficientnet_b0", "preresnet56"}) {
    const ImageModel from = make_image_model(options_of(name));
    from->named_buffers().front().value().fill_(0.25);
    for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
      write_safetensors(file_, file_of(from, type));
      ImageModel to = make_image_model(options_of(name));
      EXPECT_FALSE(load_weights(*to, shape_of(options_of(name)), file_).is_left_out());
      const TensorMap theirs = weights_of(*from), ours = weights_of(*to);
      for (const auto& [key, t] : theirs) {
        const at::Tensor expected = t.scalar_type() == at::kLong ? t : t.to(type).to(at::kFloat);
        ASSERT_TRUE(at::equal(ours.at(key), expected)) << name << ' ' << key;
      }
    }
  }
}

TEST_F(Pretrained, AnotherNumberOfClassesIsLeftOut) {
  for (const char* name : {"resnet18", "vgg16", "densenet121", "efficientnet_b0"}) {
    ImageModelOptions o = options_of(name);
    o.classes = 10;
    const ImageModel from = make_image_model(o);
    write_safetensors(file_, file_of(from));
    ImageModel to = make_image_model(options_of(name));
    const TensorMap before = weights_of(*to);
    const ClassifierFit fit = load_weights(*to, shape_of(options_of(name)), file_);
    EXPECT_TRUE(fit.is_left_out()) << name;
    EXPECT_EQ(fit.stored, 10);
    EXPECT_EQ(fit.classes, kClasses);
    EXPECT_EQ(classifier_fit(shape_of(options_of(name)), file_).layer, fit.layer);
    const TensorMap theirs = weights_of(*from), ours = weights_of(*to);
    for (const auto& [key, t] : ours) {
      const bool classifies = key == fit.layer + ".weight" || key == fit.layer + ".bias";
      ASSERT_TRUE(at::equal(t, classifies ? before.at(key) : theirs.at(key))) << name << ' ' << key;
    }
  }
}

TEST_F(Pretrained, CountersMayBeMissingAndOldNamesAreKnown) {
  const ImageModel from = make_image_model(options_of("densenet121"));
  TensorFile file = file_of(from);
  std::erase_if(file.tensors, [](const StoredTensor& t) { return t.name.ends_with("num_batches_tracked"); });
  for (StoredTensor& t : file.tensors) {
    const size_t layer = t.name.find(".denselayer");
    if (layer == std::string::npos) continue;
    t.name.insert(t.name.find_first_of("12", t.name.find('.', layer + 1)), ".");  // norm1.weight as norm.1.weight
  }
  ASSERT_TRUE(file.find("features.denseblock1.denselayer1.norm.1.weight") != nullptr);
  EXPECT_EQ(load_error(file, "densenet121"), "accepted");
  ImageModel to = make_image_model(options_of("densenet121"));
  load_weights(*to, shape_of(options_of("densenet121")), file_);
  const std::string name = "features.denseblock2.denselayer3.conv2.weight";
  EXPECT_TRUE(at::equal(weights_of(*to).at(name), weights_of(*from).at(name)));
}

TEST_F(Pretrained, WhatDoesNotFitIsRefusedByName) {
  const ImageModel from = make_image_model(options_of("resnet18"));
  const TensorFile whole = file_of(from);
  const auto changed = [&](const std::function<void(TensorFile&)>& change) {
    TensorFile file = whole;
    change(file);
    return load_error(file);
  };
  const auto named = [](TensorFile& file, const std::string& name) -> StoredTensor& {
    return *std::ranges::find(file.tensors, name, &StoredTensor::name);
  };
  EXPECT_EQ(changed([](TensorFile&) {}), "accepted");
  EXPECT_EQ(changed([](TensorFile& f) { std::erase_if(f.tensors, [](const StoredTensor& t) { return t.name == "bn1.weight"; }); }),
            "[weights] F must hold bn1.weight of [8], as resnet18 has it, got none");
  EXPECT_EQ(changed([](TensorFile& f) {
              f.tensors.push_back(stored("layer5.weight", at::randn({2, 3}), StoredType::f32));
            }),
            "[weights] F must hold the tensors of resnet18 alone, got layer5.weight of [2, 3]");
  EXPECT_EQ(changed([&](TensorFile& f) {
              named(f, "layer1.0.conv1.weight") = stored("layer1.0.conv1.weight", at::randn({8, 8, 1, 1}), StoredType::f32);
            }),
            "[weights] F: layer1.0.conv1.weight must be [8, 8, 3, 3], got [8, 8, 1, 1]");
  EXPECT_EQ(changed([&](TensorFile& f) {
              named(f, "conv1.weight") = stored("conv1.weight", at::randn({8, 3, 7, 7}), StoredType::f32);
            }),
            "[weights] F: conv1.weight must be [8, 3, 3, 3] (the stem of small images; --large-stem has the other), got [8, 3, 7, 7]");
  EXPECT_EQ(changed([&](TensorFile& f) {
              named(f, "fc.weight") = stored("fc.weight", at::randn({10, 9}), StoredType::f32);
            }),
            "[weights] F: fc.weight must be [4, 64], got [10, 9]");
  EXPECT_EQ(changed([&](TensorFile& f) { named(f, "bn1.bias") = stored("bn1.bias", at::randn({8}, at::kDouble), StoredType::f64); }),
            "[weights] F: bn1.bias must be F32, F16 or BF16, got F64");
  EXPECT_EQ(changed([&](TensorFile& f) { named(f, "bn1.bias") = stored("bn1.bias", at::randn({8}).fill_(NAN), StoredType::f32); }),
            "[weights] F: bn1.bias must be finite, got nan or infinity");
  EXPECT_EQ(changed([&](TensorFile& f) {
              named(f, "bn1.num_batches_tracked") = stored("bn1.num_batches_tracked", at::randn({}), StoredType::f32);
            }),
            "[weights] F: bn1.num_batches_tracked must be I64, got F32");
  EXPECT_EQ(load_error(whole, "resnet34").rfind("[weights] F must hold layer1.2.bn1.bias of [8], as resnet34 has it", 0), 0u);
  // A refused file leaves the model as it was.
  TensorFile file = whole;
  file.tensors.push_back(stored("more", at::randn({1}), StoredType::f32));
  write_safetensors(file_, file);
  ImageModel model = make_image_model(options_of("resnet18"));
  const at::Tensor before = weights_of(*model).at("conv1.weight");
  EXPECT_THROW(load_weights(*model, shape_of(options_of("resnet18")), file_), Error);
  EXPECT_TRUE(at::equal(weights_of(*model).at("conv1.weight"), before));
  // Broken files, in words of weights.
  ASSERT_EQ(::truncate(file_.c_str(), 1000), 0);
  EXPECT_EQ(error_of([&] { classifier_fit(shape_of(options_of("resnet18")), file_); }).rfind("[weights] " + file_, 0), 0u);
  EXPECT_EQ(error_of([&] { classifier_fit(shape_of(options_of("resnet18")), "nowhere.safetensors"); }).rfind("[weights] nowhere", 0), 0u);
}

/// What a model with frozen stages keeps, by the allocator and line by line, is the plan.
void expect_frozen_plan(const ImageModelOptions& given, int64_t side) {
  ImageModelOptions o = given;
  constexpr int64_t kImages = 3;
  if (allocates_bits(o.saving.method)) {
    const auto shares = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{kImages});
    std::vector<int64_t> samples(kImages);
    std::iota(samples.begin(), samples.end(), 0);
    shares->set_samples(samples);
    o.saving.allocator = shares;
  }
  const std::string where = o.name + ' ' + o.freeze + ' ' + o.saving.method.name;
  const std::vector<SavedTensor> plan = plan_image(shape_of(o), {kImages, side, side}, o.saving.method);
  ImageModel model = make_image_model(o);
  const at::Tensor x = at::randn({kImages, 3, side, side}).contiguous(at::MemoryFormat::ChannelsLast);
  model->forward(x);
  const MemoryMeter meter(at::kCPU);
  const at::Tensor logits = model->forward(x);
  const int64_t kept = meter.allocated() - static_cast<int64_t>(logits.nbytes());
  EXPECT_EQ(kept, total_bytes(plan)) << where;
  if (!o.saving.method.torch_baseline) {
    const std::vector<SavedTensor> lines = saved_tensors(logits);
    for (size_t i = 0; i < std::min(lines.size(), plan.size()); ++i) {
      ASSERT_TRUE(lines[i] == plan[i]) << where << ": " << text_of(lines[i]) << ", planned " << text_of(plan[i]);
    }
    EXPECT_EQ(lines.size(), plan.size()) << where;
  }
  // Weights up to the stage have no gradient, all others have one.
  logits.sum().backward();
  bool frozen = true;
  for (const auto& item : model->named_parameters()) {
    frozen = frozen && !item.value().grad().defined();
    EXPECT_EQ(item.value().grad().defined(), !frozen) << where << ' ' << item.key();
    if (stage_of(item.key()) == o.freeze) {
      EXPECT_TRUE(frozen) << where << ' ' << item.key();
    }
  }
  ImageModelOptions all = o;
  all.freeze.clear();
  EXPECT_LT(total_bytes(plan), total_bytes(plan_image(shape_of(all), {kImages, side, side}, o.saving.method))) << where;
}

TEST_F(Pretrained, FrozenStagesKeepNothing) {
  for (const char* method :
       {"fp32", "satchel", "satchel,bits=32", "satchel,mean=2.5", "satchel,side=none", "division", "exact", "gact", "actnn"}) {
    expect_frozen_plan(options_of("resnet18", method, "layer2"), 16);
    expect_frozen_plan(options_of("densenet121", method, "features.denseblock2"), 16);
  }
  for (const char* method : {"fp32", "satchel", "actnn"}) {
    expect_frozen_plan(options_of("resnet18", method, "conv1"), 16);
    expect_frozen_plan(options_of("resnet50", method, "bn1"), 16);
    expect_frozen_plan(options_of("vgg16", method, "features.2"), 32);
    expect_frozen_plan(options_of("vgg16_bn", method, "features.8"), 32);
    expect_frozen_plan(options_of("mobilenet_v2", method, "features.6"), 16);
    expect_frozen_plan(options_of("mobilenet_v2", method, "features.18"), 16);
    expect_frozen_plan(options_of("efficientnet_b0", method, "features.3"), 16);
    expect_frozen_plan(options_of("preresnet56", method, "layer1"), 16);
  }
}

TEST_F(Pretrained, FineTuningLeavesFrozenStagesAlone) {
  const ImageModel from = make_image_model(options_of("resnet18"));
  write_safetensors(file_, file_of(from));
  ImageTrainOptions o = small("satchel", 2);
  o.weights = file_;
  o.freeze = "layer2";
  o.checkpoint = run_;
  const RunResult r = train_images(data(), o);
  EXPECT_EQ(r.saved_bytes, total_bytes(r.tensors));
  EXPECT_EQ(r.saved_bytes, total_bytes(plan_image({"resnet18", kClasses, 3, true, kWidth, {}, {}, "layer2"}, {32, 16, 16}, o.method)));
  for (const SavedTensor& line : r.tensors)
    EXPECT_TRUE(line.name.starts_with("layer3") || line.name.starts_with("layer4") || line.name == "fc") << line.name;
  const TensorMap before = weights_of(*from), after = read_checkpoint(run_, kImageFormat).model;
  for (const auto& [name, t] : after) {
    const std::string stage = stage_of(name);
    const bool frozen = stage == "conv1" || stage == "bn1" || stage == "layer1" || stage == "layer2";
    EXPECT_EQ(at::equal(t, before.at(name)), frozen) << name;
  }
  // What learns below the first layer is the same network: momentum stands for trained weights alone.
  EXPECT_EQ(read_checkpoint(run_, kImageFormat).optimizer.count("0.momentum"), 1u);
  const Prediction p = predict_images(data().test, true, run_);
  EXPECT_EQ(p.count, 32);
  EXPECT_DOUBLE_EQ(p.test, r.test);
}

TEST_F(Pretrained, ARunThatIsFineTunedGoesOnBitForBit) {
  const ImageModel from = make_image_model(options_of("efficientnet_b0"));
  write_safetensors(file_, file_of(from));
  ImageTrainOptions o = small("actnn", 2);
  o.model = "efficientnet_b0";
  o.weights = file_;
  o.freeze = "features.4";
  o.checkpoint = run_;
  const RunResult whole = train_images(data(), o);
  const TensorMap wanted = read_checkpoint(run_, kImageFormat).model;
  std::remove(run_.c_str());
  const RunResult half = train_images(data(), o, [](const Progress& p) { return p.epoch < 1; });
  EXPECT_TRUE(half.interrupted);
  std::remove(file_.c_str());  // the checkpoint has its weights
  o.resume = true;
  const RunResult resumed = train_images(data(), o);
  EXPECT_EQ(resumed.loss, whole.loss);
  for (const auto& [name, t] : read_checkpoint(run_, kImageFormat).model) EXPECT_TRUE(at::equal(t, wanted.at(name))) << name;
  o.freeze = "features.5";
  EXPECT_EQ(error_of([&] { train_images(data(), o); }), "[resume] freeze must be the checkpoint's, \"features.4\", got \"features.5\"");
  o.freeze = "features.4";
  o.weights.clear();
  EXPECT_EQ(error_of([&] { train_images(data(), o); }).rfind("[resume] weights must be the checkpoint's", 0), 0u);
}

/// Checkpoints that were written before there were weights to start from: the fields are missing.
TEST_F(Pretrained, CheckpointsWithoutTheseOptionsGoOn) {
  ImageTrainOptions o = small("satchel", 2);
  o.checkpoint = run_;
  train_images(data(), o, [](const Progress& p) { return p.epoch < 1; });
  Checkpoint c = read_checkpoint(run_, kImageFormat);
  nlohmann::ordered_json options = nlohmann::ordered_json::parse(c.options);
  for (const char* name : {"weights", "freeze", "stochastic_depth"}) EXPECT_EQ(options.erase(name), 1u);
  c.options = options.dump();
  write_checkpoint(run_, c);
  EXPECT_EQ(predict_images(data().test, true, run_).count, 32);
  o.resume = true;
  EXPECT_EQ(train_images(data(), o).epochs, 2);
}

TEST_F(Pretrained, AStageThatIsNoneIsRefused) {
  ImageTrainOptions o = small("satchel");
  o.freeze = "layer9";
  EXPECT_EQ(error_of([&] { train_images(data(), o); }),
            "[train] a stage of resnet18 to freeze must be one of conv1, bn1, layer1, layer2, layer3, layer4, got 'layer9'");
  o.freeze.clear();
  o.stochastic_depth = 0.3;
  EXPECT_EQ(error_of([&] { train_images(data(), o); }), "[train] stochastic depth must be 0 for resnet18, got 0.3");
}

}  // namespace
}  // namespace satchel
