// `satchel plan --model retinanet_resnet50_fpn …`: what a detector keeps for backward.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "satchel/plan/detector_shape.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace satchel::tool {

struct DetectPlanOptions {
  DetectorShape shape;
  BatchShape batch = {16, 640, 640, false};
  int64_t boxes = kRegions;     // Faster R-CNN: of an image
  std::vector<Method> methods;  // none: fp32, actnn, division, satchel
};

/// --frozen-norm, --trainable, --boxes. Batch, image, width, channels and amp are options of image models.
std::vector<CLI::Option*> add_detect_plan_options(CLI::App& plan, DetectPlanOptions& options);

/// A line a method; one method alone layer by layer.
std::string detect_plan_text(const DetectPlanOptions& options);
nlohmann::ordered_json detect_plan_json(const DetectPlanOptions& options);

}  // namespace satchel::tool
