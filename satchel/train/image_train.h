// Training on images in batches: one call a run. The library reports by callback and throws; it prints nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "satchel/core/method.h"
#include "satchel/core/saved.h"
#include "satchel/data/image_data.h"
#include "satchel/plan/image_shape.h"
#include "satchel/train/prediction.h"
#include "satchel/train/schedule.h"

namespace satchel {

/// What autocast computes convolutions and products in; weights, statistics and losses are float32 either way. fp16 needs a loss scale.
enum class Autocast : uint8_t { none, bf16, fp16 };

/// As torch.amp.GradScaler's, with its numbers: the loss is multiplied by `initial`; a step whose gradients have an infinity or NaN is
/// left out and the scale multiplied by `backoff`; after `interval` steps without one it is multiplied by `growth`.
struct LossScale {
  double initial = 65536, growth = 2, backoff = 0.5;
  int64_t interval = 2000;
};

struct ImageTrainOptions {
  std::string model = "resnet18";
  int64_t width = 64;              // channels of the first stage
  std::optional<double> dropout;   // in front of the classifier; none: the model's own
  std::optional<bool> small_stem;  // 3×3 of stride 1 without a pool; none: where images are at most 64 pixels high and wide
  Method method = parse_method("satchel");
  int64_t epochs = 30, batch = 128;
  double lr = 0.1, weight_decay = 5e-4, momentum = 0.9;  // SGD
  bool nesterov = true;
  Decay schedule = Decay::cosine;
  double warmup = 0;               // epochs
  std::vector<double> milestones;  // epochs, schedule step; none: after each third
  double gamma = 0.1;              // schedule step
  double label_smoothing = 0;      // share of the target spread over all classes
  bool augment = true;             // random crops and flips
  int64_t image = 0;               // height and width that images in folders are brought to; 0: the data's own
  int64_t eval_every = 1;          // epochs between evaluations; the last epoch always has one
  uint64_t seed = 0;
  std::string device = "cpu";  // cpu, cuda, cuda:N
  bool tf32 = false;           // cuda: convolutions and products of float32 in TF32
  Autocast amp = Autocast::none;
  LossScale loss_scale;       // amp fp16
  bool channels_last = true;  // order of the input and the weights in memory
  int64_t loaders = 2;        // threads that prepare batches; results are the same for every number
  std::string checkpoint;     // file to write when it ends, is stopped, or every checkpoint_every epochs
  int64_t checkpoint_every = 0;
  bool resume = false;  // go on from `checkpoint`
};

struct ImageProgress {
  int64_t epoch = 0, epochs = 0;  // epochs done
  int64_t step = 0, steps = 0;    // of the epoch at work: both 0 between epochs
  double loss = 0;                // mean of the epoch
  double test = 0;                // percent, of the last evaluation; NaN before the first
  double lr = 0;                  // of the last step
  double step_seconds = 0;        // mean of the epoch
  int64_t saved_bytes = 0, peak_bytes = 0;
};

struct ImageRunResult {
  std::string method;
  uint64_t seed = 0;
  std::string device;
  double test = 0;                       // percent, after the last epoch: nothing is chosen by the test set
  double best_test = 0;                  // of all evaluations
  int64_t best_epoch = 0, epochs = 0;    // done in all, earlier sessions of a resumed run included
  double loss = 0;                       // mean of the last epoch
  double step_seconds = 0;               // median of a training step: forward, loss, backward, optimizer, and waiting for the batch
  double images_per_second = 0;          // over all epochs of this session, evaluation not counted
  int64_t batch = 0, skipped_steps = 0;  // skipped: by the loss scale
  int64_t saved_bytes = 0;           // measured: allocated after the model's forward − before, less the logits; the batch is not counted
  int64_t loss_bytes = 0;            // measured: the logits and what the loss added
  int64_t peak_bytes = 0;            // measured: the most allocated during a step − what stood before
  int64_t parameter_bytes = 0;       // of the model: gradients and momentum take as much again, each
  std::vector<SavedTensor> tensors;  // read from the autograd graph (fp32: from the plan)
  bool interrupted = false;          // progress said stop
};

/// Trains; `progress` is called after every epoch, and every few steps where they take long;
/// it returns false to stop, after the epoch.
/// On the CPU equal options give equal results for one number of torch's threads, and a resumed run continues bit for bit.
ImageRunResult train_images(const ImageSets& data, const ImageTrainOptions& options,
                            const std::function<bool(const ImageProgress&)>& progress = {});

/// Classes of images, in their order, from a checkpoint of train_images(). Images of files are brought to the size that the model was
/// tested with, others must have it. Labels of `data` are compared with the classes where it is `labelled`. Throws `[predict] …` where
/// images and model do not fit.
Prediction predict_images(const ImageData& data, bool labelled, const std::string& checkpoint, const std::string& device = "cpu",
                          int64_t loaders = 2);

}  // namespace satchel
