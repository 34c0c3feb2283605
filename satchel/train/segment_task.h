// What of a segmentation run its checkpoint holds, and its sizes. Private to this room.
#pragma once

#include <string>
#include <vector>

#include "satchel/data/scene_loader.h"
#include "satchel/plan/image_shape.h"
#include "satchel/train/segment_train.h"

namespace satchel {

/// As those of images: image_checkpoint.h.
std::string describe_options(const SegmentTrainOptions& options, const ImageShape& shape);
SegmentTrainOptions parse_segment_options(const std::string& json, ImageShape& shape);
std::string describe_data(const SceneSets& data);

/// What of the data predictions need.
struct SegmentedData {
  std::vector<std::string> class_names;
  std::vector<float> mean, deviation;
};
SegmentedData parse_segmented_data(const std::string& json);

/// Class names, or their numbers where the data have none.
std::vector<std::string> names_of_classes(const SceneData& data);

/// Test scenes: whole, those in files one by one.
SceneLoaderOptions testing_options(const SceneSets& data, const SegmentTrainOptions& options);

}  // namespace satchel
