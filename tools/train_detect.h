// `satchel train`, `plan` and `predict` of detectors: the options that only they have, and the runs.
#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "satchel/train/detect_train.h"
#include "tools/train_images.h"

namespace satchel::tool {

struct TrainCommand;
struct PredictCommand;

/// What only detectors have.
struct DetectCommand {
  std::vector<int64_t> sides;
  int64_t longest = DetectTrainOptions().longest, trainable = DetectTrainOptions().trainable;
  double max_norm = DetectTrainOptions().max_norm;
  bool frozen_norm = false;
};

constexpr const char* kDetectGroup = "Detectors";

/// Adds --sides, --longest …, in a group of their own.
void add_detect_options(CLI::App& train, DetectCommand& command);
/// What the text of --help says of detectors.
const char* detect_train_help();

void run_train_detect(const TrainCommand& command, const CLI::App& train);

/// Writes COCO results, JSON, to --output.
void run_predict_boxes(const PredictCommand& command);

}  // namespace satchel::tool
