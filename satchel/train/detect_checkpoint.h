// What of a detector's run its checkpoint holds beside the weights. Private to this room.
#pragma once

#include <string>
#include <vector>

#include "satchel/plan/detector_shape.h"
#include "satchel/train/detect_train.h"

namespace satchel {

/// As of images: all that defines a run, as flat JSON.
std::string describe_options(const DetectTrainOptions& options, const DetectorShape& shape);
/// … and back, with the model's shape, but for the number of epochs.
DetectTrainOptions parse_detect_options(const std::string& json, DetectorShape& shape);

/// Names, sizes, classes and a digest of the objects and of the files' names.
std::string describe_boxes(const SceneSets& data);
/// What predictions read of it.
struct TrainedScenes {
  std::vector<std::string> class_names;
  std::vector<int64_t> category_ids;
  std::vector<float> mean, deviation;
};
TrainedScenes parse_boxes_data(const std::string& json);

/// The options that images have too, as a ResNet's: their ranges and their JSON are the same.
ImageTrainOptions as_images(const DetectTrainOptions& options);

}  // namespace satchel
