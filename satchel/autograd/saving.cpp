#include "satchel/autograd/saving.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <mutex>
#include <span>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

thread_local SeedBank* innermost = nullptr;

/// The next numbers of torch's default generator.
void draw(std::span<uint64_t> numbers) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  auto* source = at::check_generator<at::CPUGeneratorImpl>(generator);
  for (uint64_t& n : numbers) n = source->random64();
}

}  // namespace

const Method& default_method() {
  static const Method method = parse_method("satchel");
  return method;
}

at::Tensor fresh_seed(at::Device device) {
  if (innermost != nullptr && innermost->seeds_.device() == device) {
    at::Tensor seed = innermost->next();
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

SeedBank::SeedBank(at::Tensor seeds, End end) : seeds_(std::move(seeds)), end_(end), outer_(innermost) {
  if (!seeds_.defined() || seeds_.scalar_type() != at::kLong || seeds_.dim() != 1 || !seeds_.is_contiguous()) {
    fail("seeds", "a bank must be one line of int64", seeds_.defined() ? c10::toString(seeds_.scalar_type()) : "nothing");
  }
  innermost = this;
}

SeedBank::~SeedBank() { innermost = outer_; }

at::Tensor SeedBank::next() {
  const int64_t at = asked_++;
  if (at < seeds_.numel()) return seeds_.narrow(0, at, 1);
  if (end_ == End::refuses) fail("seeds", "a step must ask for at most " + std::to_string(seeds_.numel()) + " seeds", asked_);
  return {};
}

void check_dropout(double p, const char* op) {
  if (!(p >= 0) || std::round(p * 65536) >= 65536) fail(op, "dropout must be at least 0 and less than 1", p);
}

double dropout_scale(double p) { return 65536 / (65536 - std::round(p * 65536)); }

}  // namespace satchel
