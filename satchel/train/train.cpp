#include "satchel/train/train.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "satchel/autograd/seeds.h"
#include "satchel/core/error.h"
#include "satchel/core/median.h"
#include "satchel/core/noise.h"
#include "satchel/tensor/output.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/graph_task.h"
#include "satchel/train/memory.h"
#include "satchel/train/options.h"
#include "satchel/train/step.h"

namespace satchel {
namespace {

constexpr uint32_t kWeights = 1;  // rank of the seed of initial weights; steps have rank 0

GraphModel make_model(const TrainOptions& options, at::Device device) {
  const SeededTorch weights(derive_seed(options.seed, 0, kWeights, 0));  // on the CPU: equal on every device and for every method
  GraphModel model(model_options(options));
  model->to(device);
  return model;
}

/// `finite`: are all logits?
Scores evaluate(GraphModel& model, const GraphTask& task, bool& finite) {
  const at::NoGradGuard guard;
  model->eval();
  const at::Tensor logits = model->forward(task.input, task.a);
  model->train();
  finite = logits.isfinite().all().item<bool>();
  return {score_of(task, logits, task.train), score_of(task, logits, task.valid), score_of(task, logits, task.test)};
}

TrainOptions checked(const GraphData& data, TrainOptions options) {
  options.shape = shape_for(data, options.shape);
  validate(options);
  if (!options.checkpoint.empty()) check_replaceable(options.checkpoint, "train");
  // A run that goes on does so in the type that it has: what decided may have been another version's.
  if (options.resume && options.amp == Amp::automatic) options.amp = parse_options(read_checkpoint(options.checkpoint).options).amp;
  options.amp = amp_for(options, range_of(data.features), "train");
  return options;
}

class Run {
 public:
  Run(const GraphData& data, const TrainOptions& asked)
      : options_(checked(data, asked)),
        device_(device_of(options_.device)),
        task_(make_task(data, options_)),
        model_(make_model(options_, device_)),
        scale_(gradient_scale(task_, options_)),
        optimizer_(options_, model_->parameters(), scale_) {
    if (!options_.checkpoint.empty()) data_ = describe_data(data);
    state_.cached_rows = cached_rows(task_, options_);
    if (options_.resume) resume();
    state_.cached_rows = std::min(state_.cached_rows, task_.a.nodes());
    if (state_.cached_rows > 0) task_.input = with_aggregated(std::move(task_.input), task_.a, state_.cached_rows);
    step_.emplace(StepParts{[this] { return model_->logits(task_.input, task_.a); },
                            [this](const at::Tensor& logits) { return loss_of(task_, logits, options_.method.plain, scale_); }},
                  optimizer_, device_, options_.cuda_graph);
  }
  Run(const Run&) = delete;

  bool goes_on() const { return state_.epoch < options_.epochs && (options_.patience == 0 || state_.since_best < options_.patience); }

  void epoch() {
    // Of the first steps, the first without gradients and optimizer state to stand before it: the next replaces it.
    const bool measures = steps_ < TrainStep::kEager;
    const bool warms_up = measures || (step_->has_graph() && steps_ == TrainStep::kEager);  // the next one captures the graph
    StepCost cost;
    const auto start = std::chrono::steady_clock::now();
    const uint64_t seed = derive_seed(options_.seed, static_cast<uint64_t>(state_.epoch + 1), 0, 0);
    const at::Tensor loss = (*step_)(seed, measures ? &cost : nullptr);
    state_.loss = loss.item<double>();
    last_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    ++state_.epoch;
    ++steps_;
    if (!std::isfinite(state_.loss))
      fail("train", finite_rule(options_.amp == Amp::fp16 ? "loss and gradients" : "loss"),
           (std::isnan(state_.loss) ? "nan" : "infinity") + (" at epoch " + std::to_string(state_.epoch)));
    (warms_up ? watched_seconds_ : seconds_).push_back(last_seconds_);
    if (measures) keep(std::move(cost));
  }

  /// Where one is due; the last epoch's is extra otherwise, and a resumed run goes on as if it had not been.
  void evaluate_if_due() {
    extra_.reset();
    if (state_.epoch % options_.eval_every != 0) {
      if (state_.epoch == options_.epochs) extra_ = evaluate(model_, task_, finite_);
      return;
    }
    state_.last = evaluate(model_, task_, finite_);
    ++state_.since_best;
    if (!is_better(state_.last)) return;
    state_.best = state_.last;
    state_.best_epoch = state_.epoch;
    state_.since_best = 0;
    if (!options_.checkpoint.empty()) best_ = weights_of(*model_);
  }

  Progress progress() const {
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    const bool evaluated = extra_ || state_.best_epoch > 0;
    const Scores last = extra_ ? *extra_ : evaluated ? state_.last : Scores{kNone, kNone, kNone};
    const double best = extra_ && is_better(*extra_) ? extra_->valid : evaluated ? state_.best.valid : kNone;
    return {state_.epoch,
            options_.epochs,
            state_.loss,
            last.train,
            last.valid,
            last.test,
            best,
            last_seconds_,
            state_.measured.saved_bytes,
            state_.measured.peak_bytes};
  }

  void checkpoint_if_due() {
    if (options_.checkpoint_every == 0 || state_.epoch % options_.checkpoint_every != 0) return;
    check_logits("");
    write();
  }

  RunResult finish(bool interrupted) {
    if (state_.epoch % options_.eval_every != 0 && !extra_) extra_ = evaluate(model_, task_, finite_);
    check_logits(", the last");
    write();
    const bool last = extra_ && is_better(*extra_);
    const Scores& best = last ? *extra_ : state_.best;
    RunResult r;
    r.method = options_.method.name;
    r.seed = options_.seed;
    r.device = options_.device;
    r.amp = options_.amp;
    r.test = best.test;
    r.valid = best.valid;
    r.train = best.train;
    r.best_epoch = last ? state_.epoch : state_.best_epoch;
    r.epochs = state_.epoch;
    r.loss = state_.loss;
    r.epoch_seconds = measured().epoch_seconds;
    r.saved_bytes = measured().saved_bytes;
    r.loss_bytes = measured().loss_bytes;
    r.peak_bytes = measured().peak_bytes;
    r.cached_bytes = cached_bytes();
    r.cuda_graph = step_->replays();
    r.eager_because = step_->eager_because();
    r.tensors = options_.method.plain || tensors_.empty()
                    ? plan_graph(options_.shape, task_.input.nodes(), options_.method, !task_.input.x.defined())
                    : tensors_;
    r.interrupted = interrupted;
    return r;
  }

 private:
  /// A step's loss is older than the weights that it left: the last evaluation tells of those.
  void check_logits(const char* which) const {
    if (!finite_) fail("train", finite_rule("logits"), "nan or infinity after epoch " + std::to_string(state_.epoch) + which);
  }
  std::string finite_rule(const char* what) const {
    const char* help =
        options_.amp == Amp::fp16 ? "; float16's range is small: --amp none, or a smaller lr, may help)" : "; a smaller lr may help)";
    return std::string(what) + " must be finite (" + options_.method.name + help;
  }
  bool is_better(const Scores& s) const { return state_.best_epoch == 0 || s.valid > state_.best.valid || std::isnan(state_.best.valid); }
  int64_t cached_bytes() const { return state_.cached_rows > 0 ? static_cast<int64_t>(task_.input.aggregated.nbytes()) : 0; }

  Measured measured() const {
    Measured m = state_.measured;
    if (!seconds_.empty() || !watched_seconds_.empty()) m.epoch_seconds = median(seconds_.empty() ? watched_seconds_ : seconds_);
    return m;
  }

  void keep(StepCost cost) {
    state_.measured = {cost.saved_bytes, cost.loss_bytes,
                       std::max(steps_ > 2 ? state_.measured.peak_bytes : 0, cost.peak_bytes + cached_bytes()), 0};
    std::erase_if(cost.tensors, [](const SavedTensor& s) { return s.kind == "loss"; });
    tensors_ = std::move(cost.tensors);
  }

  void resume() {
    const Checkpoint c = read_checkpoint(options_.checkpoint);
    check_equal(describe_options(parse_options(c.options)), describe_options(options_), "options");
    check_equal(c.data, data_, "data");
    if (c.state.epoch > options_.epochs)
      fail("resume", "epochs must be at least the " + std::to_string(c.state.epoch) + " done", options_.epochs);
    state_ = c.state;
    best_ = c.best;
    set_weights(*model_, c.model);
    optimizer_.restore(c.optimizer);
  }

  void write() const {
    if (options_.checkpoint.empty()) return;
    Checkpoint c{describe_options(options_), data_, state_, weights_of(*model_), best_, {}};
    for (const auto& [name, tensor] : optimizer_.state()) c.optimizer[name] = tensor.to(at::kCPU);
    c.state.measured = measured();
    c.state.use_last = extra_ ? is_better(*extra_) : state_.best_epoch == 0;
    write_checkpoint(options_.checkpoint, c);
  }

  TrainOptions options_;
  at::Device device_;
  GraphTask task_;
  GraphModel model_;
  double scale_;  // of gradients on their way back
  ParameterStep optimizer_;
  std::optional<TrainStep> step_;
  std::string data_;
  RunState state_;
  TensorMap best_;
  std::optional<Scores> extra_;  // of the last epoch, where none was due
  std::vector<SavedTensor> tensors_;
  std::vector<double> seconds_, watched_seconds_;  // of steps as most are, and of the first ones
  double last_seconds_ = 0;
  int64_t steps_ = 0;   // of this session
  bool finite_ = true;  // all logits of the last evaluation
};

}  // namespace

RunResult train_graph(const GraphData& data, const TrainOptions& options, const std::function<bool(const Progress&)>& progress) {
  try {
    const CurrentDevice current(device_of(options.device));
    const Tf32Guard tf32(options);
    Run run(data, options);
    bool stopped = false;
    while (!stopped && run.goes_on()) {
      run.epoch();
      run.evaluate_if_due();
      stopped = progress && !progress(run.progress());
      run.checkpoint_if_due();
    }
    return run.finish(stopped);
  } catch (const c10::Error& e) {
    if (!out_of_memory(e)) throw;
    const std::string size = std::to_string(options.shape.layers) + " layers × " + std::to_string(options.shape.hidden);
    fail("train", "graph, model and saves must fit into memory", size + " on " + options.device);
  }
}

}  // namespace satchel
