// Detectors by their sizes: names, levels, and what each layer keeps. No torch.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "satchel/plan/image_plan.h"

namespace satchel {

/// The sizes of a detector; models/detection.h says what they mean.
struct DetectorShape {
  std::string name = "retinanet_resnet50_fpn";
  int64_t classes = 91, channels = 3, width = 64;
  bool frozen_norm = false;
  int trainable = 5;
  bool operator==(const DetectorShape&) const = default;
};

/// retinanet_resnet50_fpn, fasterrcnn_resnet50_fpn.
std::span<const std::string_view> detector_names();
bool is_detector(std::string_view name);
bool has_regions(std::string_view name);  // Faster R-CNN: boxes are proposed first, and read from the maps one by one

/// Throws `[op] rule, got value` unless name and sizes fit.
void validate(const DetectorShape& shape, const char* op);

constexpr int64_t kRegions = 512;     // Faster R-CNN: boxes of an image that its second half is trained on, at most
constexpr int64_t kPadMultiple = 32;  // pixels: batches are padded to a multiple

/// What the maps of a batch keep, line by line as the autograd room reports it, without the losses. Of Faster R-CNN up to the proposals:
/// what its second half keeps depends on how many boxes there are, plan_regions().
std::vector<SavedTensor> plan_detector(const DetectorShape& shape, const BatchShape& batch, const Method& method);
/// … of so many boxes in all; four levels' lines of boxes themselves are 24 bytes a box, and stand apart.
std::vector<SavedTensor> plan_regions(const DetectorShape& shape, int64_t boxes, const Method& method, bool half = false);

}  // namespace satchel
