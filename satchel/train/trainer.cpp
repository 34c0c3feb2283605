#include "satchel/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/median.h"
#include "satchel/train/async_scalar.h"

namespace satchel {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kWatched = 3;  // first steps, whose memory is watched: the first lacks gradients that stand, the next replaces it
constexpr auto kBetweenReports = std::chrono::milliseconds(250);  // within an epoch
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// A step's loss on its way to the host.
struct LateLoss {
  AsyncScalar loss;
  int64_t step;  // of the epoch, from 1 on
  bool warms_up;
};

class Trainer {
 public:
  Trainer(TrainTask& task, const RunOptions& options, const std::optional<Checkpoint>& from)
      : task_(task), options_(options), data_(task.describe_own_data()) {
    if (from) resume(*from);
    state_.cached_rows = task_.cached_rows();
  }

  bool goes_on() const { return state_.epoch < options_.epochs && (task_.patience() == 0 || state_.since_best < task_.patience()); }

  /// Ends the epoch at work. False where the report said stop, which it may do after any step.
  bool epoch(const ProgressReport& report) {
    const auto start = Clock::now();
    const int64_t first = state_.step;
    auto reported = start;
    const auto mean_seconds = [&] { return seconds_since(start) / static_cast<double>(state_.step - first); };
    task_.start(state_.epoch, state_.step);
    while (step() < task_.steps()) {
      if (report && losses_read() > 0 && Clock::now() - reported >= kBetweenReports) {
        reported = Clock::now();
        const double loss = state_.loss_sum / static_cast<double>(losses_read());
        if (!report(progress(loss, mean_seconds()))) {
          end_part(start);
          return false;
        }
      }
      if (checkpoint_due()) checkpoint();
    }
    end_part(start);
    const double took = mean_seconds();
    end_epoch();
    const bool on = !report || report(progress(state_.loss, took));
    if (on && checkpoint_due()) checkpoint();
    return on;
  }

  RunResult finish(bool interrupted) {
    if (interrupted) write_last();  // before the evaluation, which may take longer than whoever stopped the run waits
    if ((state_.step > 0 || state_.epoch % options_.eval_every != 0) && !extra_) extra_ = task_.evaluate();
    if (!interrupted) write_last();
    const bool extra_best = extra_ && is_better(*extra_);
    const Scores& last = extra_ ? *extra_ : state_.last;
    const Scores& best = extra_best ? *extra_ : state_.best;
    const Scores& chosen = task_.validates() ? best : last;
    RunResult r;
    r.method = options_.method.name;
    r.seed = options_.seed;
    r.device = options_.device;
    r.amp = options_.amp;
    r.test = chosen.test;
    r.valid = chosen.valid;
    r.train = chosen.train;
    r.best_test = best.test;
    r.best_epoch = extra_best ? state_.epoch : state_.best_epoch;
    r.since_best = extra_best ? 0 : state_.since_best;
    r.epochs = state_.epoch;
    r.steps = state_.step;
    r.loss = state_.step > 0 ? state_.loss_sum / static_cast<double>(state_.step) : state_.loss;
    r.step_seconds = measured().step_seconds;
    r.saved_bytes = state_.measured.saved_bytes;
    r.loss_bytes = state_.measured.loss_bytes;
    r.peak_bytes = state_.measured.peak_bytes;
    r.tensors = tensors_;
    r.curve = curve_;
    if (extra_ && state_.step == 0 && !r.curve.empty()) set_scores(r.curve.back(), *extra_);
    r.options = task_.describe();
    r.data = data_;
    r.interrupted = interrupted;
    task_.add_to(r, trained_seconds_ > 0 ? static_cast<double>(steps_) / trained_seconds_ : 0);
    if (!checkpoint_error_.empty()) throw CheckpointNotWritten(checkpoint_error_, std::move(r));
    return r;
  }

 private:
  /// One step; reads the loss of the step before while the device works: a device that is asked for this one's would have nothing to do
  /// until the next is queued. Returns the steps done of the epoch.
  int64_t step() {
    const bool watched = steps_ < kWatched;
    StepCost cost;
    if (!late_) last_read_ = Clock::now();
    const at::Tensor loss = task_.step(state_.epoch, state_.step, watched ? &cost : nullptr);
    LateLoss now{AsyncScalar(loss), state_.step + 1, watched || task_.warms_up(steps_)};
    task_.prefetch();
    read_loss();
    late_.emplace(std::move(now));
    if (watched) read_loss();
    ++state_.step;
    ++steps_;
    if (watched) keep(std::move(cost));
    return state_.step;
  }

  int64_t losses_read() const { return state_.step - (late_ ? 1 : 0); }

  /// Of the step whose loss is still on its way, if any. Before an epoch ends or becomes a checkpoint, all have been read.
  void read_loss() {
    if (!late_) return;
    const LateLoss late = std::move(*late_);
    late_.reset();
    const double loss = late.loss.read();
    (late.warms_up ? first_seconds_ : seconds_).push_back(seconds_since(last_read_));
    last_read_ = Clock::now();
    if (!std::isfinite(loss))
      refuse(task_.loss_name(), std::isnan(loss) ? "nan" : "infinity",
             "at epoch " + std::to_string(state_.epoch + 1) + (task_.steps() > 1 ? ", step " + std::to_string(late.step) : ""));
    state_.loss_sum += loss;
  }

  void end_part(Clock::time_point start) {
    read_loss();
    trained_seconds_ += seconds_since(start);
  }

  void end_epoch() {
    state_.loss = state_.loss_sum / static_cast<double>(state_.step);
    state_.loss_sum = 0;
    state_.step = 0;
    ++state_.epoch;
    curve_.push_back({state_.epoch, state_.loss, kNone, kNone, kNone});
    evaluate_if_due();
  }

  /// Where one is due; the last epoch's is extra otherwise, and a resumed run goes on as if it had not been.
  void evaluate_if_due() {
    extra_.reset();
    if (state_.epoch % options_.eval_every != 0) {
      if (state_.epoch == options_.epochs) extra_ = task_.evaluate();
      return;
    }
    state_.last = task_.evaluate();
    set_scores(curve_.back(), state_.last);
    ++state_.since_best;
    if (!is_better(state_.last)) return;
    state_.best = state_.last;
    state_.best_epoch = state_.epoch;
    state_.since_best = 0;
    if (task_.validates() && !options_.checkpoint.empty()) best_ = weights_of(task_.model());
  }

  static void set_scores(CurvePoint& point, const Scores& s) { point = {point.epoch, point.loss, s.train, s.valid, s.test}; }

  double metric(const Scores& s) const { return task_.validates() ? s.valid : s.test; }
  bool is_better(const Scores& s) const {
    return state_.best_epoch == 0 || metric(s) > metric(state_.best) || std::isnan(metric(state_.best));
  }

  Progress progress(double loss, double step_seconds) const {
    const bool evaluated = extra_ || state_.best_epoch > 0;
    const Scores last = extra_ ? *extra_ : evaluated ? state_.last : Scores{kNone, kNone, kNone};
    Progress p;
    p.epoch = state_.epoch;
    p.epochs = options_.epochs;
    p.step = state_.step;
    p.steps = state_.step > 0 ? task_.steps() : 0;
    p.loss = loss;
    p.train = last.train;
    p.valid = last.valid;
    p.test = last.test;
    p.best_valid = extra_ && is_better(*extra_) ? extra_->valid : evaluated ? state_.best.valid : kNone;
    p.lr = task_.lr();
    p.step_seconds = step_seconds;
    p.saved_bytes = state_.measured.saved_bytes;
    p.peak_bytes = state_.measured.peak_bytes;
    p.checkpoint_error = checkpoint_error_;
    return p;
  }

  Measured measured() const {
    Measured m = state_.measured;
    if (!seconds_.empty() || !first_seconds_.empty()) m.step_seconds = median(seconds_.empty() ? first_seconds_ : seconds_);
    return m;
  }

  void keep(StepCost cost) {
    state_.measured = {cost.saved_bytes, cost.loss_bytes,
                       std::max(steps_ > 2 ? state_.measured.peak_bytes : 0, cost.peak_bytes + task_.standing_bytes()), 0};
    tensors_ = std::move(cost.tensors);
  }

  [[noreturn]] void refuse(const std::string& what, const std::string& got, const std::string& when) const {
    fail("train", what + " must be finite (" + options_.method.name + "; " + task_.advice() + ")", got + " " + when);
  }

  bool checkpoint_due() const { return options_.checkpoint_every > 0 && seconds_since(written_) >= 60 * options_.checkpoint_every; }

  void checkpoint() {
    read_loss();
    check_logits(false);
    write();
  }

  void write_last() {
    check_logits(true);
    write();
  }

  /// A step's loss is older than the weights that it leaves.
  void check_logits(bool last) {
    if (task_.logits_are_finite()) return;
    const std::string where = state_.step > 0 ? "in epoch " + std::to_string(state_.epoch + 1) + ", step " + std::to_string(state_.step)
                                              : "after epoch " + std::to_string(state_.epoch) + (last ? ", the last" : "");
    refuse("logits", "nan or infinity", where);
  }

  /// A file that cannot be written is tried again when the next one is due: the run is worth more than any of them.
  void write() {
    written_ = Clock::now();
    if (options_.checkpoint.empty()) return;
    Checkpoint c{task_.describe(), data_, state_, weights_of(task_.model()), best_, {}, task_.format(), curve_};
    for (const auto& [name, tensor] : task_.state()) c.optimizer[name] = tensor.to(at::kCPU);
    c.state.measured = measured();
    c.state.use_last = !task_.validates() || (extra_ ? is_better(*extra_) : state_.best_epoch == 0);
    check_finite(c, options_.checkpoint);
    checkpoint_error_.clear();
    try {
      write_checkpoint(options_.checkpoint, c);
    } catch (const Error& e) {
      checkpoint_error_ = e.what();
    }
    written_ = Clock::now();
  }

  void resume(const Checkpoint& c) {
    check_equal(task_.read_options(c.options), task_.describe(), "options");
    check_equal(c.data, data_, "data");
    if (c.state.epoch > options_.epochs || (c.state.epoch == options_.epochs && c.state.step > 0))
      fail("resume", "epochs must be at least the " + std::to_string(c.state.epoch) + " done", options_.epochs);
    if (c.state.step >= task_.steps()) fail("resume", "a checkpoint must stand within an epoch's steps", c.state.step);
    state_ = c.state;
    best_ = c.best;
    curve_ = c.curve;
    set_weights(task_.model(), c.model);
    task_.restore(c.optimizer);
  }

  TrainTask& task_;
  const RunOptions& options_;
  std::string data_;
  RunState state_;
  TensorMap best_;
  std::vector<CurvePoint> curve_;
  std::optional<Scores> extra_;  // of the last epoch, where none was due
  std::vector<SavedTensor> tensors_;
  std::vector<double> seconds_, first_seconds_;  // of steps as most are, and of those that warm up
  std::optional<LateLoss> late_;
  Clock::time_point last_read_;               // the end of a step, or the beginning where none was under way
  Clock::time_point written_ = Clock::now();  // or tried to
  std::string checkpoint_error_;
  double trained_seconds_ = 0;
  int64_t steps_ = 0;  // of this session
};

}  // namespace

RunResult run_task(TrainTask& task, const RunOptions& options, const std::optional<Checkpoint>& from, const ProgressReport& report) {
  Trainer trainer(task, options, from);
  bool stopped = false;
  while (!stopped && trainer.goes_on()) stopped = !trainer.epoch(report);
  return trainer.finish(stopped && trainer.goes_on());
}

}  // namespace satchel
