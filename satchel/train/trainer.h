// The one training loop: epochs of steps, evaluations, checkpoints and the report. What is trained is a TrainTask. Private to this room.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "satchel/train/checkpoint.h"
#include "satchel/train/run.h"
#include "satchel/train/step.h"

namespace satchel {

/// A model, its data and its steps. Everything that its next step reads is in the model's weights, in state(), or follows from the number
/// of the step: that is why a run goes on bit for bit.
class TrainTask {
 public:
  virtual ~TrainTask() = default;

  /// What defines the run, as JSON: its options, as a checkpoint of the same run writes them, and its data.
  virtual std::string describe() const = 0;
  virtual std::string describe_own_data() const = 0;
  /// Options from a checkpoint, which may be of an earlier version, as describe() would write them now.
  virtual std::string read_options(const std::string& json) const { return json; }
  virtual const char* format() const = 0;

  virtual int64_t steps() const = 0;  // an epoch has
  /// The next step is `step` of `epoch`, both from 0 on.
  virtual void start(int64_t epoch, int64_t step) = 0;
  /// Trains one step. Returns the loss where it was computed; memory is watched where `cost` is given.
  virtual at::Tensor step(int64_t epoch, int64_t step, StepCost* cost) = 0;
  /// Makes the next step's data ready, while the device works.
  virtual void prefetch() {}
  /// Is this step, the first of a session being 0, slower than those after it?
  virtual bool warms_up(int64_t) const { return false; }
  virtual double lr() const = 0;  // of the last step

  /// Percent; NaN where there is nothing to score.
  virtual Scores evaluate() = 0;
  /// Is the best epoch that of the best validation metric, and are its weights kept? Else nothing is chosen.
  virtual bool validates() const = 0;
  /// So many evaluations without a better one end the run; 0: none do.
  virtual int64_t patience() const { return 0; }
  /// Are the logits of the weights finite, as far as is known?
  virtual bool logits_are_finite() = 0;
  virtual std::string loss_name() const { return "loss"; }
  /// What may help a run whose loss or logits are not.
  virtual std::string advice() const = 0;

  virtual torch::nn::Module& model() = 0;
  virtual TensorMap state() const = 0;
  virtual void restore(const TensorMap& state) = 0;
  virtual int64_t cached_rows() const { return 0; }
  virtual int64_t standing_bytes() const { return 0; }  // that count as a step's peak

  /// What only the task knows of a result. `tensors` of the result are those of the last step that was watched, perhaps none.
  virtual void add_to(RunResult& result, double steps_per_second) const = 0;
};

/// Runs the task to its end, from the checkpoint where there is one.
RunResult run_task(TrainTask& task, const RunOptions& options, const std::optional<Checkpoint>& from, const ProgressReport& report);

}  // namespace satchel
