// A training run, whatever it trains on: its options, its progress and its result. The library reports by callback and throws; it prints
// nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/core/layer.h"
#include "satchel/core/method.h"
#include "satchel/core/saved.h"

namespace satchel {

/// What runs on graphs (TrainOptions) and on images (ImageTrainOptions) both have.
struct RunOptions {
  Method method = parse_method("satchel");
  int64_t epochs = 200;
  double lr = 0.01, weight_decay = 0, momentum = 0.9;  // momentum: of SGD
  int64_t eval_every = 1;                              // epochs between evaluations; the last epoch always has one
  uint64_t seed = 0;
  std::string device = "cpu";   // cpu, cuda, cuda:N
  bool tf32 = false;            // cuda: products and convolutions of float32 in TF32
  Amp amp = Amp::automatic;     // what activations are computed and kept in; weights, statistics and losses are float32 either way
  std::string checkpoint;       // file to write when the run ends or is stopped, and every checkpoint_every minutes
  double checkpoint_every = 0;  // minutes, within an epoch too; 0: only at the end
  bool resume = false;          // go on from `checkpoint`; where there is no such file the run starts anew
};

/// One epoch of a run. Metrics in percent, NaN where none was computed.
struct CurvePoint {
  int64_t epoch = 0;  // from 1 on
  double loss = 0;    // mean of its steps
  double train = std::numeric_limits<double>::quiet_NaN(), valid = train, test = train;
};

struct Progress {
  int64_t epoch = 0, epochs = 0;          // epochs done
  int64_t step = 0, steps = 0;            // of the epoch at work: both 0 between epochs
  double loss = 0;                        // mean of the epoch so far
  double train = 0, valid = 0, test = 0;  // percent, of the last evaluation; NaN before the first and where there is nothing to score
  double best_valid = 0;                  // NaN likewise
  double lr = 0;                          // of the last step
  double step_seconds = 0;                // mean of the epoch
  int64_t saved_bytes = 0, peak_bytes = 0;
  std::string checkpoint_error;  // why the last checkpoint could not be written, where it could not; the run goes on and tries again
};
using ProgressReport = std::function<bool(const Progress&)>;  // false: stop

struct RunResult {
  std::string method;
  uint64_t seed = 0;
  std::string device;
  Amp amp = Amp::none;                    // what features and activations were kept in
  double test = 0, valid = 0, train = 0;  // percent. Graphs: at the epoch of the best validation metric. Images: test, after the last epoch
  double best_test = 0;                   // images: of all evaluations; nothing is chosen by it
  int64_t best_epoch = 0, epochs = 0;     // epochs: done in all, earlier sessions of a resumed run included
  int64_t since_best = 0;                 // evaluations after the best epoch's
  int64_t steps = 0;                      // of the epoch that it was stopped in
  double loss = 0;                        // mean of the last epoch
  double step_seconds = 0;  // median of a training step: forward, loss, backward, optimizer, waiting for the batch; evaluation not counted
  double images_per_second = 0;          // images: over all epochs of this session
  int64_t batch = 0, skipped_steps = 0;  // images; skipped: by the loss scale
  int64_t saved_bytes = 0;       // measured: asked for after the model's forward − before, less the logits; a batch is not counted
  int64_t loss_bytes = 0;        // measured: the logits and what the loss added
  int64_t peak_bytes = 0;        // measured: the most allocated during a step − what stood before; a cached A·X counts.
                                 // With a CUDA graph: of the steps before its capture; its pool is as large again
  int64_t cached_bytes = 0;      // graphs, of it: A·X
  int64_t last_layer_bytes = 0;  // graphs, of it: the edges of training nodes, whose outputs alone the last layer gives
  int64_t parameter_bytes = 0;   // of the model: gradients and optimizer state take as much again, each
  bool cuda_graph = false;       // steps were replayed from a CUDA graph
  std::string eager_because;     // why they were not, where nothing was said and the device is CUDA
  std::vector<std::pair<std::string, double>> more_scores;   // of the last evaluation of this session, percent, by name; perhaps none
  std::vector<SavedTensor> tensors;                          // read from the autograd graph (fp32: from the plan)
  std::vector<CurvePoint> curve;                             // one an epoch, earlier sessions included
  std::vector<std::pair<std::string, double>> class_scores;  // segmentation: the last evaluation's IoU by class, percent; NaN: absent
  std::string options, data;                                 // JSON: what defines the run, and sizes and digest of its data
  bool interrupted = false;                                  // the report said stop before all was done
};

/// The run ended well, but its last checkpoint could not be written: the result is here.
struct CheckpointNotWritten : Error {
  CheckpointNotWritten(const std::string& what, RunResult done) : Error(what), result(std::move(done)) {}
  RunResult result;
};

}  // namespace satchel
