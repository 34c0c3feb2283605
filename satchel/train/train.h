// Full-graph training: one call a run. An epoch is one step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "satchel/data/graph_data.h"
#include "satchel/plan/graph_plan.h"
#include "satchel/train/prediction.h"
#include "satchel/train/run.h"

namespace satchel {

enum class Optimizer : uint8_t { adam, adamw, sgd };
/// Every node's outputs, or those of training nodes alone, which are all that a loss reads.
enum class LastLayer : uint8_t { all, training };

struct TrainOptions : RunOptions {
  GraphShape shape;  // features and classes are taken from the data
  Optimizer optimizer = Optimizer::adam;
  double clip = 0;          // largest norm of all gradients together; 0: none
  int64_t patience = 0;     // evaluations without a better validation metric before it stops; 0: never
  int64_t split = 0;        // which of the data's splits
  bool self_loops = false;  // sage: a node averages itself too (other layers count it in any case)
  bool cache_aggregate =
      true;  // A·X of dense features once, where they are at most 2·hidden wide and it takes at most a quarter of free memory
  int64_t cache_bytes = 0;                // most of A·X that is so kept, its first rows; 0: all
  LastLayer last_layer = LastLayer::all;  // whose outputs the last layer of a training step gives
  std::optional<bool> cuda_graph;         // cuda: steps after the third are replayed from a CUDA graph; the same results, bit for bit.
                                          // none: where it can be, on CUDA, and steps run one by one elsewhere
  // amp automatic: fp16 where tf32 would round features and activations as much anyway (amp_for() of graph_task.h), else none
};

/// Trains; `progress` is called after every epoch and returns false to stop. Equal options give equal results on one machine
/// (for one number of threads), and a resumed run continues bit for bit. Throws CheckpointNotWritten where all but the last checkpoint
/// was done.
RunResult train_graph(const GraphData& data, const TrainOptions& options, const ProgressReport& progress = {});

/// Classes of all nodes from a checkpoint of train_graph(), with the metric on the test nodes of the run's split. Data need no labels:
/// task and classes are then the checkpoint's.
Prediction predict_graph(const GraphData& data, const std::string& checkpoint, const std::string& device = "cpu");

}  // namespace satchel
