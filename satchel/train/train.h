// Full-graph training: one call a run. The library reports by callback and throws; it prints nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "satchel/core/layer.h"
#include "satchel/core/method.h"
#include "satchel/core/saved.h"
#include "satchel/data/graph_data.h"
#include "satchel/plan/graph_plan.h"
#include "satchel/train/prediction.h"

namespace satchel {

enum class Optimizer : uint8_t { adam, adamw, sgd };

struct TrainOptions {
  GraphShape shape;  // features and classes are taken from the data
  Method method = parse_method("satchel");
  int64_t epochs = 200;
  Optimizer optimizer = Optimizer::adam;
  double lr = 0.01, weight_decay = 0, momentum = 0.9;  // momentum: sgd
  double clip = 0;                                     // largest norm of all gradients together; 0: none
  int64_t eval_every = 1;                              // epochs between evaluations; the last epoch always has one
  int64_t patience = 0;                                // evaluations without a better validation metric before it stops; 0: never
  uint64_t seed = 0;
  int64_t split = 0;           // which of the data's splits
  std::string device = "cpu";  // cpu, cuda, cuda:N
  bool self_loops = false;     // sage: a node averages itself too (gcn always does)
  bool cache_aggregate =
      true;  // A·X of dense features once, where they are at most 2·hidden wide and it takes at most a quarter of free memory
  int64_t cache_bytes = 0;         // most of A·X that is so kept, its first rows; 0: all
  bool tf32 = false;               // cuda: products of float32 matrices in TF32
  Amp amp = Amp::automatic;        // bf16, fp16: features and activations in so many bits; weights, statistics and losses in float32.
                                   // automatic: fp16 where tf32 would round them as much anyway (amp_for() of graph_task.h), else none
  std::optional<bool> cuda_graph;  // cuda: steps after the third are replayed from a CUDA graph; the same results, bit for bit.
                                   // none: where it can be, on CUDA, and steps run one by one elsewhere
  std::string checkpoint;          // file to write when it ends, is stopped, or every checkpoint_every epochs
  int64_t checkpoint_every = 0;
  bool resume = false;  // go on from `checkpoint`
};

struct Progress {
  int64_t epoch = 0, epochs = 0;  // epochs done
  double loss = 0;
  double train = 0, valid = 0, test = 0;  // of the last evaluation, in percent; NaN before the first, as best_valid
  double best_valid = 0;
  double epoch_seconds = 0;  // of this epoch's training step
  int64_t saved_bytes = 0, peak_bytes = 0;
};

struct RunResult {
  std::string method;
  uint64_t seed = 0;
  std::string device;
  Amp amp = Amp::none;                    // what features and activations were kept in
  double test = 0, valid = 0, train = 0;  // percent, at the epoch of the best validation metric
  int64_t best_epoch = 0, epochs = 0;     // done in all, earlier sessions of a resumed run included
  double loss = 0;                        // of the last epoch
  double epoch_seconds = 0;               // median of a training step: forward, loss, backward, optimizer; evaluation not counted
  int64_t saved_bytes = 0;                // measured: allocated after the model's forward − before, less the logits
  int64_t loss_bytes = 0;                 // measured: the logits and what the loss added
  int64_t peak_bytes = 0;                 // measured: the most allocated during a step − what stood before; a cached A·X counts.
                                          // With a CUDA graph: of the steps before its capture; its pool is as large again
  int64_t cached_bytes = 0;               // of it: A·X
  bool cuda_graph = false;                // steps were replayed from a CUDA graph
  std::string eager_because;              // why they were not, where nothing was said and the device is CUDA
  std::vector<SavedTensor> tensors;       // read from the autograd graph (fp32: from the plan)
  bool interrupted = false;               // progress said stop
};

/// Trains; `progress` is called after every epoch and returns false to stop. Equal options give equal results on one machine
/// (for one number of threads), and a resumed run continues bit for bit.
RunResult train_graph(const GraphData& data, const TrainOptions& options, const std::function<bool(const Progress&)>& progress = {});

/// Classes of all nodes from a checkpoint of train_graph(), with the metric on the test nodes of the run's split. Data need no labels:
/// task and classes are then the checkpoint's.
Prediction predict_graph(const GraphData& data, const std::string& checkpoint, const std::string& device = "cpu");

}  // namespace satchel
