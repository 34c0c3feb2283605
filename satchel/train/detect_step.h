// One training step of a detector, its batches on a device, and what it finds. Private to this room and tools.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "satchel/data/scene_loader.h"
#include "satchel/models/detection.h"
#include "satchel/train/detect_train.h"
#include "satchel/train/optimizer.h"
#include "satchel/train/step.h"

namespace satchel {

struct BoxTensors {
  at::Tensor images;             // float32 count × channels × height × width
  BoxTargets targets;            // crowds left out
  std::vector<int64_t> indices;  // places in the data set
  SceneBatch host;               // as the loader gave it, without its images
};

/// Batches of scenes on a device, one ahead of the step that reads them.
class BoxFeed {
 public:
  /// `data` must outlive it. `first_class`: the label of class 0.
  BoxFeed(const SceneData& data, const SceneLoaderOptions& options, at::Device device, bool channels_last, int64_t first_class);
  const SceneLoader& loader() const { return loader_; }
  void start(int64_t epoch, int64_t batch = 0);
  bool next(BoxTensors& batch);

 private:
  at::Tensor on_device(const void* values, at::IntArrayRef sizes, at::ScalarType type) const;

  SceneLoader loader_;
  at::Device device_;
  at::MemoryFormat order_;
  int64_t first_class_;
};

SceneLoaderOptions detect_training_options(const SceneSets& data, const DetectTrainOptions& options);
SceneLoaderOptions detect_testing_options(const std::vector<float>& mean, const std::vector<float>& deviation,
                                          const DetectTrainOptions& options);

/// The detector's own sizes for data of so many classes.
DetectorShape shape_of(const DetectTrainOptions& options, int64_t classes, int64_t channels = 3);
/// The label that a detector gives class 0: 1 where its first logit is the background's.
int64_t first_class_of(const std::string& model);

/// The model of a run from its seed, on a device: equal weights on every device and for every method.
Detector make_detector(const DetectTrainOptions& options, const DetectorShape& shape, at::Device device,
                       const std::shared_ptr<BitAllocator>& allocator = {});

/// The step of a run: TrainStep on a batch, under autocast, by SGD.
class DetectStep {
 public:
  DetectStep(Detector model, const DetectTrainOptions& options, at::Device device);
  DetectStep(const DetectStep&) = delete;
  DetectStep& operator=(const DetectStep&) = delete;

  at::Tensor operator()(const at::Tensor& images, const BoxTargets& targets, const Rates& rates, uint64_t seed, StepCost* cost = nullptr);

  int64_t skipped() const { return optimizer_.loss_scale() ? optimizer_.loss_scale()->skipped() : 0; }
  at::Tensor loss_scale() const { return optimizer_.loss_scale() ? optimizer_.loss_scale()->factor() : at::Tensor(); }
  Detector model() const { return model_; }
  int64_t parameter_bytes() const { return optimizer_.parameter_bytes(); }
  std::map<std::string, at::Tensor> state() const { return optimizer_.state(); }
  void restore(const std::map<std::string, at::Tensor>& state) { optimizer_.restore(state); }

 private:
  Detector model_;
  at::Device device_;
  Amp amp_;
  ParameterStep optimizer_;
  at::Tensor images_;  // of the step at work
  BoxTargets targets_;
  DetectorOutputs outputs_;
  TrainStep step_;
};

/// What the model finds in the batch's images, in pixels of the data's own, labels from 0 on; in evaluation mode, under autocast.
std::vector<std::vector<FoundBox>> found_in(Detector& model, const BoxTensors& batch, at::Device device, Amp amp, int64_t first_class);

/// The objects of scene i of a batch, in pixels of the data's own image.
std::vector<ObjectBox> own_objects(const SceneData& data, const SceneBatch& batch, size_t i);

}  // namespace satchel
