// `satchel train` and `satchel predict` of models of segmentation: the options that only they have, and the runs.
#pragma once

#include <CLI/App.hpp>
#include <string>
#include <vector>

#include "satchel/train/segment_train.h"
#include "tools/train_images.h"

namespace satchel::tool {

struct TrainCommand;
struct PredictCommand;

/// What they have beside image models.
struct SegmentTrainCommand {
  ImageTrainCommand images;
  SegmentTrainOptions options;  // whose image options are those of `images`, once the command is whole
  bool no_aux = false;
};

constexpr const char* kSegmentGroup = "Segmentation models";

void add_segment_options(CLI::App& train, SegmentTrainCommand& command);

/// With what was given of the options that all models or image models have: their defaults differ.
SegmentTrainCommand segment_command(const TrainCommand& command, const CLI::App& train);

/// What the text of --help says of them.
const char* segment_train_help();

void run_train_segment(const SegmentTrainCommand& command);

/// What `satchel predict` reads: the test scenes of a data set (or, without any, those to train on), or the image files of a folder, by
/// name.
struct ScenesToPredict {
  SceneData data;
  bool labelled = false;
};
ScenesToPredict scenes_to_predict(const std::string& where, SceneTask task);

/// Masks of scenes as PNG files into a folder.
void predict_segment(const PredictCommand& command);

}  // namespace satchel::tool
