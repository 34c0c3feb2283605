// Training a class a pixel: one call a run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "satchel/data/scenes.h"
#include "satchel/train/image_train.h"

namespace satchel {

/// `image` is the side of the crops; 0: 480, or that of drawn scenes. `augment` is scale, crop and flip; without it the upper left corner
/// is taken. Label smoothing is none.
struct SegmentTrainOptions : ImageTrainOptions {
  SegmentTrainOptions() {
    model = "fcn_resnet50";
    lr = 0.01;
    weight_decay = 1e-4;
    batch = 8;
    nesterov = false;
    schedule = Decay::poly;
  }
  double aux_weight = 0.5;            // of the auxiliary head's loss
  std::vector<double> class_weights;  // one a class, or none: 1 each
  double least_scale = 0.5, most_scale = 2;
};

/// Throws `[train] rule, got value` unless every number is in its range.
void validate(const SegmentTrainOptions& options);

/// As train_images(). The metric is the mean IoU over the classes that truth or predictions have, in percent; pixels that are ignored do
/// not count. Test scenes are read whole, those in files one by one.
RunResult train_segmentation(const SceneSets& data, const SegmentTrainOptions& options, const ProgressReport& progress = {});

struct SegmentPrediction {
  int64_t count = 0;
  std::vector<std::string> class_names;
  std::vector<double> ious;  // by class, percent; none where the scenes have no masks
  double mean_iou = 0;       // NaN likewise
};

/// Hands a mask of each scene, in order, to `take`, from a checkpoint of train_segmentation(). Masks of the scenes, where they have some,
/// are scored. Throws `[predict] …` where scenes and model do not fit.
SegmentPrediction predict_masks(const SceneData& data, const std::string& checkpoint,
                                const std::function<void(int64_t index, const Mask& mask)>& take, const std::string& device = "cpu",
                                int64_t loaders = 2);

}  // namespace satchel
