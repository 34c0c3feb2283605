// `satchel train` and `satchel predict`.
#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "satchel/train/train.h"
#include "tools/arguments.h"
#include "tools/train_detect.h"
#include "tools/train_images.h"
#include "tools/train_runs.h"
#include "tools/train_segment.h"

namespace satchel::tool {

struct TrainCommand : RunsCommand {
  std::string model = "sage", norm = "batch", activation = "relu", optimizer = "adam", amp = "auto", last_layer = "all";
  TrainOptions options;
  std::optional<double> checkpoint_every;  // minutes
  std::string cache;                       // as bench graph's
  bool no_cache = false, unweighted = false;
  ImageTrainCommand images;      // of image models: what they have of their own
  SegmentTrainCommand segments;  // … and what models of segmentation have beside that
  DetectCommand detect;          // of detectors
};

struct PredictCommand {
  std::string checkpoint, data, output, scores, device = "cpu";
  int64_t loaders = 2;  // of images
  bool unweighted = false;
};

void add_train_commands(CLI::App& app);

/// Of --checkpoint-every, which needs --checkpoint.
double checkpoint_minutes(const TrainCommand& command);
void run_train(const TrainCommand& command);
void run_predict(const PredictCommand& command);

}  // namespace satchel::tool
