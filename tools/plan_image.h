// `satchel plan --model resnet50 …`: what an image model keeps for backward, and the largest batch that fits.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "satchel/plan/image_plan.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace satchel::tool {

constexpr int64_t kVocClasses = 21;  // that models of segmentation have where nothing else is said

struct ImagePlanOptions {
  ImageShape shape = {"", 1000, 3, false, 64, {}};
  int64_t batch = 256;
  int64_t image = 224;                          // side
  bool small_stem = false, large_stem = false;  // neither: as `train` chooses for images of this size
  bool no_aux = false;                          // segmentation
  std::string fit;                              // "16GB": the largest batch instead
  std::string amp = "none";                     // bf16, fp16: autocast
  std::vector<Method> methods;                  // none: fp32, actnn, division, satchel
};

/// --batch, --image, --channels, --small-stem, --large-stem, --no-aux, --width, --amp, --fit. Model, classes, dropout and methods are
/// options of every plan.
std::vector<CLI::Option*> add_image_plan_options(CLI::App& plan, ImagePlanOptions& options);

/// A whole number, which the plan itself checks further.
CLI::Option* add_count(CLI::App& app, const std::string& name, int64_t& to, const std::string& help);

/// A line a method with its parts; one method alone layer by layer; beside them the published figures where the model is theirs.
std::string image_plan_text(const ImagePlanOptions& options);
nlohmann::ordered_json image_plan_json(const ImagePlanOptions& options);

}  // namespace satchel::tool
