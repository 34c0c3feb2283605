// Where the seeds of saves come from: (run, step, save). Threads have runs of their own, so that two of them never disturb each other.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

namespace satchel {

/// The run of one thread: its number, the step it is in, and how many seeds that step has used. A backward pass that reaches a node
/// recorded in the run ends the step.
class StepClock {
 public:
  StepClock() = default;
  StepClock(uint64_t run, uint64_t step) : run_(run), step_(step) {}

  bool has_run() const { return run_.has_value(); }
  /// Starts over: step 0 of another run.
  void restart(uint64_t run);
  /// The next number of this step; has_run() holds.
  uint64_t next();
  /// Told by every node that backward reaches, from any thread. `task`: the engine's number of the pass.
  void backward_begins(int task);
  /// Counts steps and restarts: what was packed in another era belongs to another step.
  uint64_t era() const { return era_; }

 private:
  std::optional<uint64_t> run_;
  std::atomic<uint64_t> step_{0}, era_{0};
  std::atomic<int> task_{-1};
  uint64_t counted_step_ = 0;
  uint32_t saves_ = 0;  // of counted_step_
};

/// The clock of this thread: that of the innermost SeedRun, else the thread's own.
const std::shared_ptr<StepClock>& step_clock();

/// While it lives, seeds of this thread are those of run `run`, from step `step` on, whatever torch's generator does. Without one a
/// thread's run is one number drawn from torch's default generator when the thread needs its first seed, and again after
/// torch::manual_seed(). As for torch's own functions, another thread's manual_seed() counts too: threads that seed for themselves want a
/// SeedRun.
class SeedRun {
 public:
  explicit SeedRun(uint64_t run, uint64_t step = 0);
  ~SeedRun();
  SeedRun(const SeedRun&) = delete;
  SeedRun& operator=(const SeedRun&) = delete;

 private:
  std::shared_ptr<StepClock> outer_;
};

/// A seed of its own for one save. An int64[1] tensor on `device`; no host synchronisation. Where a SeedBank lives in this thread, its
/// next seed.
at::Tensor fresh_seed(at::Device device);

/// `count` seeds in a line on `device`: the numbers that as many calls of fresh_seed() would have given, by one asynchronous copy.
at::Tensor draw_seeds(int64_t count, at::Device device);
/// The same into a line of seeds that stands already, in the order of the current stream.
void redraw_seeds(const at::Tensor& seeds);

/// While it lives, fresh_seed() in this thread hands out the seeds of a line in turn, as views, for the line's device: a step's
/// seeds reach the GPU together, and lie where a captured CUDA graph reads them anew. The innermost one serves.
class SeedBank {
 public:
  /// What fresh_seed() does when all are used: draw its own, as without a bank, or refuse: a graph would hold that one number for ever.
  enum class End : uint8_t { draws, refuses };

  explicit SeedBank(at::Tensor seeds, End end = End::draws);
  ~SeedBank();
  SeedBank(const SeedBank&) = delete;
  SeedBank& operator=(const SeedBank&) = delete;

  /// Seeds asked for so far, those drawn beyond the line too.
  int64_t asked() const { return asked_; }

 private:
  friend at::Tensor fresh_seed(at::Device device);
  /// The next seed; undefined where it is to be drawn.
  at::Tensor next();

  at::Tensor seeds_;
  End end_;
  int64_t asked_ = 0;
  SeedBank* outer_;
};

/// While it lives, torch's default CPU generator starts from `seed`: for initial weights, which torch draws from it. Afterwards it goes on
/// where it was. One thread at a time: others that want one, or a run of their own, wait.
class SeededTorch {
 public:
  explicit SeededTorch(uint64_t seed);
  ~SeededTorch();
  SeededTorch(const SeededTorch&) = delete;
  SeededTorch& operator=(const SeededTorch&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> alone_;
  at::Tensor state_;
};

/// The seed of torch's own functions on a GPU (fp32's dropout); nothing on the CPU. The generator is the device's: all threads share it.
void seed_torch_on(at::Device device, uint64_t seed);

}  // namespace satchel
