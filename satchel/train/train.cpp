#include "satchel/train/train.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/noise.h"
#include "satchel/tensor/output.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/graph_task.h"
#include "satchel/train/memory.h"
#include "satchel/train/options.h"
#include "satchel/train/step.h"
#include "satchel/train/trainer.h"

namespace satchel {
namespace {

TrainOptions checked(const GraphData& data, TrainOptions options, const std::optional<Checkpoint>& from) {
  options.shape = shape_for(data, options.shape);
  validate(options);
  if (!options.checkpoint.empty()) check_replaceable(options.checkpoint, "train");
  // A run that goes on does so in the type that it has: what decided may have been another version's.
  if (from && options.amp == Amp::automatic) options.amp = parse_options(from->options).amp;
  options.amp = amp_for(options, range_of(data.features), "train");
  return options;
}

/// A graph and its model: an epoch is one step over all nodes.
class GraphTraining : public TrainTask {
 public:
  GraphTraining(const GraphData& data, const TrainOptions& asked, const std::optional<Checkpoint>& from)
      : data_(data),
        options_(checked(data, asked, from)),
        device_(device_of(options_.device)),
        task_(make_task(data, options_)),
        model_(make_graph_model(options_, device_)),
        scale_(gradient_scale(task_, options_)),
        optimizer_(options_, model_->parameters(), scale_),
        cached_rows_(std::min(from ? from->state.cached_rows : satchel::cached_rows(task_, options_), task_.a.nodes())),
        step_({[this] { return training_logits(model_, task_); },
               [this](const at::Tensor& logits) { return loss_of(task_, logits, is_baseline(options_.method), scale_); }},
              optimizer_, device_, options_.cuda_graph) {
    if (wants_training_rows(options_)) give_training_rows(task_);
    if (cached_rows_ > 0) task_.input = with_aggregated(std::move(task_.input), task_.a, cached_rows_);
    cast_bytes_ = model_->reserve_casts();
  }

  const TrainOptions& options() const { return options_; }

  std::string describe() const override { return describe_options(options_); }
  std::string describe_own_data() const override { return describe_data(data_); }
  std::string read_options(const std::string& json) const override { return describe_options(parse_options(json)); }
  const char* format() const override { return kGraphFormat; }

  int64_t steps() const override { return 1; }
  void start(int64_t, int64_t) override {}
  at::Tensor step(int64_t epoch, int64_t, StepCost* cost) override {
    const at::Tensor loss = step_(derive_seed(options_.seed, static_cast<uint64_t>(epoch + 1), 0, 0), cost);
    if (cost != nullptr) std::erase_if(cost->tensors, [](const SavedTensor& s) { return s.kind == "loss"; });
    return loss;
  }
  bool warms_up(int64_t step) const override { return step_.has_graph() && step == TrainStep::kEager; }  // it captures the graph
  double lr() const override { return options_.lr; }

  Scores evaluate() override {
    const at::NoGradGuard guard;
    model_->eval();
    const at::Tensor logits = model_->forward(task_.input, task_.a);
    model_->train();
    finite_ = logits.isfinite().all().item<bool>();
    return {score_of(task_, logits, task_.train), score_of(task_, logits, task_.valid), score_of(task_, logits, task_.test)};
  }
  bool validates() const override { return true; }
  int64_t patience() const override { return options_.patience; }
  bool logits_are_finite() override { return finite_; }
  std::string loss_name() const override { return options_.amp == Amp::fp16 ? "loss and gradients" : "loss"; }
  std::string advice() const override {
    return options_.amp == Amp::fp16 ? "float16's range is small: --amp none, or a smaller lr, may help" : "a smaller lr may help";
  }

  torch::nn::Module& model() override { return *model_; }
  TensorMap state() const override { return optimizer_.state(); }
  void restore(const TensorMap& state) override { optimizer_.restore(state); }
  int64_t cached_rows() const override { return cached_rows_; }
  int64_t standing_bytes() const override { return cached_bytes() + last_layer_bytes(task_) + cast_bytes_; }

  void add_to(RunResult& r, double) const override {
    r.cached_bytes = cached_bytes();
    r.last_layer_bytes = last_layer_bytes(task_);
    r.cuda_graph = step_.replays();
    r.eager_because = step_.eager_because();
    r.parameter_bytes = optimizer_.parameter_bytes();
    if (is_baseline(options_.method) || r.tensors.empty())
      r.tensors = plan_graph(options_.shape, task_.input.nodes(), options_.method, !task_.input.x.defined());
  }

 private:
  int64_t cached_bytes() const { return cached_rows_ > 0 ? static_cast<int64_t>(task_.input.aggregated.nbytes()) : 0; }

  const GraphData& data_;
  TrainOptions options_;
  at::Device device_;
  GraphTask task_;
  GraphModel model_;
  double scale_;  // of gradients on their way back
  ParameterStep optimizer_;
  int64_t cached_rows_;     // of A·X
  int64_t cast_bytes_ = 0;  // of weights in 16 bits
  TrainStep step_;
  bool finite_ = true;  // all logits of the last evaluation
};

}  // namespace

RunResult train_graph(const GraphData& data, const TrainOptions& options, const ProgressReport& progress) {
  try {
    const CurrentDevice current(device_of(options.device));
    const Tf32Guard tf32(options);
    const std::optional<Checkpoint> from = checkpoint_to_resume(options, kGraphFormat);
    GraphTraining task(data, options, from);
    return run_task(task, task.options(), from, progress);
  } catch (const c10::Error& e) {
    if (!out_of_memory(e)) throw;
    const std::string size = std::to_string(options.shape.layers) + " layers × " + std::to_string(options.shape.hidden);
    fail("train", "graph, model and saves must fit into memory", size + " on " + options.device);
  }
}

}  // namespace satchel
