#include "satchel/autograd/seeds.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <numbers>
#include <span>
#include <utility>

#include "satchel/autograd/step.h"
#include "satchel/core/error.h"
#include "satchel/core/noise.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

/// Who holds it may set torch's generator and set it back, unseen by threads that look at it below.
std::recursive_mutex& torch_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

/// What a thread has seen of torch's generator, which says to nobody that it was seeded.
///
/// A generator keeps a normal number of float32 to spare, which no function of torch's draws on the CPU, and drops it when it is seeded.
/// One is put there, fit for use: where it is gone, or another, the generator was seeded since. A state that was restored shows by having
/// gone back.
class GeneratorWatch {
 public:
  bool seeded_anew(at::CPUGeneratorImpl& generator) {
    const at::mt19937_data_pod now = generator.engine().data();
    const bool new_mark = !mark_ || generator.next_float_normal_sample() != mark_;
    const bool went_back = now.state_[0] == first_number_ && now.next_ < used_;
    saw(now);
    return new_mark || went_back;
  }
  void mark(at::CPUGeneratorImpl& generator, uint64_t run) {
    if (!generator.next_float_normal_sample()) generator.set_next_float_normal_sample(normal_of(run));
    mark_ = generator.next_float_normal_sample();
    saw(generator.engine().data());
  }

 private:
  void saw(const at::mt19937_data_pod& now) {
    first_number_ = now.state_[0];
    used_ = now.next_;
  }
  static float normal_of(uint64_t run) {
    const double u = (static_cast<double>(run >> 32) + 0.5) * 0x1p-32, angle = static_cast<double>(run & 0xffffffffu) * 0x1p-32;
    return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * angle));
  }

  std::optional<float> mark_;
  uint32_t first_number_ = 0, used_ = 0;
};

struct ThreadRun {
  std::shared_ptr<StepClock> own = std::make_shared<StepClock>();
  std::shared_ptr<StepClock> current = own;
  GeneratorWatch watch;
  SeedBank* bank = nullptr;  // the innermost
};

ThreadRun& thread_run() { return step_context().part<ThreadRun>(); }

/// Where no SeedRun says which run it is: looks whether torch's generator was seeded, and draws a run from it if so.
void look_at_torch(ThreadRun& thread) {
  const std::lock_guard<std::recursive_mutex> alone(torch_mutex());
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  auto* source = at::check_generator<at::CPUGeneratorImpl>(generator);
  if (!thread.watch.seeded_anew(*source)) return;
  const uint64_t run = source->random64();
  thread.own->restart(run);
  thread.watch.mark(*source, run);
}

/// The next numbers of this thread's step.
void draw(std::span<uint64_t> numbers) {
  ThreadRun& thread = thread_run();
  if (thread.current == thread.own) look_at_torch(thread);
  for (uint64_t& n : numbers) n = thread.current->next();
}

}  // namespace

void StepClock::restart(uint64_t run) {
  run_ = run;
  step_ = 0;
  saves_ = 0;
  counted_step_ = 0;
  ++era_;
}

uint64_t StepClock::next() {
  const uint64_t step = step_;
  if (step != counted_step_) saves_ = 0;
  counted_step_ = step;
  return derive_seed(*run_, step, 0, saves_++);
}

void StepClock::backward_begins(int task) {
  if (task_.exchange(task) == task) return;
  ++step_;
  ++era_;
}

const std::shared_ptr<StepClock>& step_clock() { return thread_run().current; }

SeedRun::SeedRun(uint64_t run, uint64_t step) : outer_(std::exchange(thread_run().current, std::make_shared<StepClock>(run, step))) {}

SeedRun::~SeedRun() { thread_run().current = std::move(outer_); }

at::Tensor fresh_seed(at::Device device) {
  if (SeedBank* bank = thread_run().bank; bank != nullptr && bank->seeds_.device() == device) {
    at::Tensor seed = bank->next();
    if (seed.defined()) return seed;
  }
  uint64_t number = 0;
  draw({&number, 1});
  return seed_tensor(number, device);
}

at::Tensor draw_seeds(int64_t count, at::Device device) {
  at::Tensor seeds = at::empty({count}, at::TensorOptions().dtype(at::kLong).device(device));
  redraw_seeds(seeds);
  return seeds;
}

void redraw_seeds(const at::Tensor& seeds) {
  const int64_t count = seeds.numel();
  if (count == 0) return;
  // Pinned memory of its own each time: torch's allocator gives it out again only after the copy has been done.
  const at::Tensor host = at::empty({count}, at::TensorOptions().dtype(at::kLong).pinned_memory(seeds.is_cuda()));
  draw({reinterpret_cast<uint64_t*>(host.mutable_data_ptr<int64_t>()), static_cast<size_t>(count)});
  seeds.copy_(host, /*non_blocking=*/true);
}

SeedBank::SeedBank(at::Tensor seeds, End end) : seeds_(std::move(seeds)), end_(end), outer_(thread_run().bank) {
  if (!seeds_.defined() || seeds_.scalar_type() != at::kLong || seeds_.dim() != 1 || !seeds_.is_contiguous()) {
    fail("seeds", "a bank must be one line of int64", seeds_.defined() ? c10::toString(seeds_.scalar_type()) : "nothing");
  }
  thread_run().bank = this;
}

SeedBank::~SeedBank() { thread_run().bank = outer_; }

at::Tensor SeedBank::next() {
  const int64_t at = asked_++;
  if (at < seeds_.numel()) return seeds_.narrow(0, at, 1);
  if (end_ == End::refuses) fail("seeds", "a step must ask for at most " + std::to_string(seeds_.numel()) + " seeds", asked_);
  return {};
}

SeededTorch::SeededTorch(uint64_t seed) : alone_(torch_mutex()) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  state_ = generator.get_state();
  generator.set_current_seed(seed);
}

SeededTorch::~SeededTorch() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state_);
}

void seed_torch_on(at::Device device, uint64_t seed) {
  if (device.is_cpu()) return;
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

}  // namespace satchel
