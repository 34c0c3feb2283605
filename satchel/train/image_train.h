// Training on images in batches: one call a run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "satchel/data/image_data.h"
#include "satchel/plan/image_shape.h"
#include "satchel/train/prediction.h"
#include "satchel/train/run.h"
#include "satchel/train/schedule.h"

namespace satchel {

using Autocast = Amp;  // what autocast computes convolutions and products in; fp16 has a loss scale, automatic is none
using ImageProgress = Progress;
using ImageRunResult = RunResult;

/// As torch.amp.GradScaler's, with its numbers: the loss is multiplied by `initial`; a step whose gradients have an infinity or NaN is
/// left out and the scale multiplied by `backoff`; after `interval` steps without one it is multiplied by `growth`.
struct LossScale {
  double initial = 65536, growth = 2, backoff = 0.5;
  int64_t interval = 2000;
};

struct ImageTrainOptions : RunOptions {
  ImageTrainOptions() {
    epochs = 30;
    lr = 0.1;
    weight_decay = 5e-4;
    amp = Amp::none;
  }
  std::string model = "resnet18";
  int64_t width = 64;              // channels of the first stage
  std::optional<double> dropout;   // in front of the classifier; none: the model's own
  std::optional<bool> small_stem;  // 3×3 of stride 1 without a pool; none: where images are at most 64 pixels high and wide
  int64_t batch = 128;
  bool nesterov = true;
  Decay schedule = Decay::cosine;
  double warmup = 0;               // epochs
  std::vector<double> milestones;  // epochs, schedule step; none: after each third
  double gamma = 0.1;              // schedule step
  double label_smoothing = 0;      // share of the target spread over all classes
  bool augment = true;             // random crops and flips
  int64_t image = 0;               // height and width that images in folders are brought to; 0: the data's own
  LossScale loss_scale;            // amp fp16
  bool channels_last = true;       // order of the input and the weights in memory
  int64_t loaders = 2;             // threads that prepare batches; results are the same for every number
  bool aux = true;                 // segmentation: with an auxiliary head
};

/// Trains; `progress` is called after every epoch, and every few steps where they take long;
/// it returns false to stop, after the step.
/// On the CPU equal options give equal results for one number of torch's threads, and a resumed run continues bit for bit. Throws
/// CheckpointNotWritten where all but the last checkpoint was done.
RunResult train_images(const ImageSets& data, const ImageTrainOptions& options, const ProgressReport& progress = {});

/// Classes of images, in their order, from a checkpoint of train_images(). Images of files are brought to the size that the model was
/// tested with, others must have it. Labels of `data` are compared with the classes where it is `labelled`. Throws `[predict] …` where
/// images and model do not fit.
Prediction predict_images(const ImageData& data, bool labelled, const std::string& checkpoint, const std::string& device = "cpu",
                          int64_t loaders = 2);

}  // namespace satchel
