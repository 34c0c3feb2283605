// Checkpoints of training: a safetensors file, so that Python reads the weights with one line.
//
//   model.<name>              weights and buffers after the last step
//   best.<name>               the same at the epoch of the best validation metric; none where no evaluation was due yet
//   optimizer.step, optimizer.<parameter>.<field>, and whatever else the next step reads
//   curve                     float64, one row an epoch: epoch, loss, and train, valid and test metric (NaN where none was computed)
//   metadata: format, digest (of the tensors), options (what defines the run; the method as its text), data (name, sizes, a digest of the
//   content), state; the last three as JSON
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "satchel/train/train.h"

namespace satchel {

struct Scores {
  double train = 0, valid = 0, test = 0;  // percent
};

/// What a step of a run costs. Memory as RunResult has it.
struct Measured {
  int64_t saved_bytes = 0, loss_bytes = 0, peak_bytes = 0;
  double step_seconds = 0;
};

/// Where a run stands between two steps.
struct RunState {
  int64_t epoch = 0;        // epochs done
  int64_t step = 0;         // steps done of the next one
  double loss = 0;          // mean of the last epoch
  double loss_sum = 0;      // of those steps
  Scores last;              // of the last evaluation that was due
  Scores best;              // of the first of those with the best validation metric
  int64_t best_epoch = 0;   // 0: none was due yet
  int64_t since_best = 0;   // evaluations
  int64_t cached_rows = 0;  // of A·X that were made once: (A·X)·W and A·(X·W) round differently
  bool use_last = false;    // the last epoch's weights serve predictions, not best.*
  Measured measured;
};

using TensorMap = std::map<std::string, at::Tensor>;

constexpr const char* kGraphFormat = "satchel graph training 1";
constexpr const char* kImageFormat = "satchel image training 1";
constexpr const char* kDetectFormat = "satchel detection training 1";
constexpr const char* kSegmentFormat = "satchel segmentation training 1";

struct Checkpoint {
  std::string options, data;  // JSON
  RunState state;
  TensorMap model, best, optimizer;
  std::string format = kGraphFormat;
  std::vector<CurvePoint> curve;
};

/// All that defines a run on a graph, as flat JSON; left out are files, the number of epochs, and whether steps come from a CUDA graph. The
/// shape has features and classes. The method is its text, which parse_method() reads.
std::string describe_options(const TrainOptions& options);
TrainOptions parse_options(const std::string& json);
std::string describe_data(const GraphData& data);

/// Throws unless every field but the name is equal: `[resume] lr must be the checkpoint's, 0.01, got 0.02`.
void check_equal(const std::string& checkpoint, const std::string& now, const char* what);

/// Throws where the model's weights are not all finite: the loss of the step that made them so was. `path`: for the error.
void check_finite(const Checkpoint& checkpoint, const std::string& path);
/// Throws, and leaves the file alone, where weights are not finite or the file cannot be written.
void write_checkpoint(const std::string& path, const Checkpoint& checkpoint);
/// The format that a checkpoint says to have.
std::string checkpoint_format(const std::string& path);
/// Throws where anything is missing or not what it should be, the format too.
Checkpoint read_checkpoint(const std::string& path, const std::string& format = kGraphFormat);
/// What a run with these options goes on from; none where it starts anew.
std::optional<Checkpoint> checkpoint_to_resume(const RunOptions& options, const std::string& format);

/// Copies of parameters and buffers by name, on the CPU.
TensorMap weights_of(const torch::nn::Module& model);
/// Throws unless names, shapes and types are the model's own.
void set_weights(torch::nn::Module& model, const TensorMap& weights);

}  // namespace satchel
