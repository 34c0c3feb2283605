// Training detectors on scenes: one call a run; and what a trained one finds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "satchel/data/scenes.h"
#include "satchel/train/box_score.h"
#include "satchel/train/image_train.h"

namespace satchel {

/// Of ImageTrainOptions the stem, dropout, label smoothing and `image` say nothing here; `augment` flips.
struct DetectTrainOptions : ImageTrainOptions {
  DetectTrainOptions() {
    model = "retinanet_resnet50_fpn";
    width = 64;
    epochs = 12;
    batch = 8;
    lr = 0.01;
    weight_decay = 1e-4;
    nesterov = false;
  }
  std::vector<int64_t> sides;  // images' shorter side is brought to one of these, drawn for each; tested at the last. None: as they are
  int64_t longest = 1333;      // but the longer side to at most this
  bool frozen_norm = false;    // norms of the ResNet are constants
  double max_norm = 10;        // of all gradients together: larger ones are made as long as this; 0: any
  int64_t trainable = 5;       // stages of the ResNet that are trained, from the last one back
};

/// Throws `[train] rule, got value` unless every number is in its range.
void validate(const DetectTrainOptions& options);

/// As train_images(). RunResult::test is the mean average precision of the test scenes after the last epoch (COCO's, train/box_score.h), in
/// percent; more_scores has its parts.
RunResult train_detector(const SceneSets& data, const DetectTrainOptions& options, const ProgressReport& progress = {});

/// What is found in each scene, best first, by a checkpoint of train_detector(), in pixels of the data's own images.
struct FoundBoxes {
  std::vector<std::vector<FoundBox>> scenes;
  BoxScores scores;  // where the scenes have objects; else NaN
  std::vector<std::string> class_names;
  std::vector<int64_t> category_ids;  // of the data that it was trained on, or none
};
FoundBoxes predict_boxes(const SceneData& data, bool labelled, const std::string& checkpoint, const std::string& device = "cpu",
                         int64_t loaders = 2);

}  // namespace satchel
