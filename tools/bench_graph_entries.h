// What `satchel bench graph` times: the same model in plain torch and with each method.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "satchel/train/graph_task.h"
#include "satchel/train/step.h"

namespace satchel::tool {

/// A model that trains, and what its steps cost.
struct BenchResult {
  std::string name;
  bool plain_torch = false;
  bool cuda_graph = false;    // its steps were replayed from one
  std::string eager_because;  // as RunResult has it
  Amp amp = Amp::none;        // decided
  bool fits = true;           // else nothing below was measured: memory ran out
  StepCost cost;
  int64_t cached_bytes = 0;      // A·X
  int64_t last_layer_bytes = 0;  // edges of training nodes
  std::vector<double> seconds;   // of a step

  double median() const;
  int64_t peak_bytes() const { return cost.peak_bytes + cached_bytes + last_layer_bytes; }
};

/// One graph, one shape of model. Dense features only.
class GraphBench {
 public:
  /// Options: shape, device, amp, cuda_graph, cache_aggregate, last_layer. The data stay on the host until an entry needs them.
  GraphBench(const GraphData& data, const TrainOptions& options);

  int64_t entries() const { return host_.a.matrix.entries(); }
  /// What features and activations are kept in; without a method: plain torch's.
  Amp amp_of(const Method* method) const;

  /// Plain torch first, where it is asked for. On the CPU one step of each in turn, round by round; on CUDA one after the other, each
  /// alone on the device, plain torch always without a CUDA graph.
  std::vector<BenchResult> run(const std::vector<Method>& methods, bool torch, int64_t steps) const;

  /// ‖own − torch's‖ / ‖torch's‖ over the gradients of all parameters together: a bias before a BatchNorm has none of its own.
  double gradient_error(const Method& method) const;

 private:
  class Entry;
  BenchResult run_alone(const Method* method, int64_t steps) const;

  TrainOptions options_;
  at::Device device_;
  FeatureRange range_;
  GraphTask host_;  // features in float32
};

/// At 32 bits a method's gradients are plain torch's, on a small graph in float32 and without dropout, which draws other masks. Returns
/// the error; throws where it is more than rounding.
double check_gradients(TrainOptions options);

}  // namespace satchel::tool
