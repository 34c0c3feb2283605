#include "satchel/train/step.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "satchel/autograd/report.h"
#include "satchel/autograd/save_policy.h"
#include "satchel/core/error.h"
#include "satchel/train/memory.h"

namespace satchel {

TrainStep::TrainStep(StepParts parts, ParameterStep& optimizer, at::Device device, std::optional<bool> cuda_graph)
    : parts_(std::move(parts)), optimizer_(optimizer), device_(device), may_fall_back_(!cuda_graph.has_value()) {
  if (cuda_graph.value_or(false) && !device_.is_cuda()) fail("train", "cuda_graph needs device cuda", device_);
  if (!cuda_graph.value_or(device_.is_cuda())) return;
  try {
    graph_ = std::make_unique<CapturedWork>(device_);
  } catch (const Error& e) {
    if (!may_fall_back_) throw;
    eager_because_ = e.what();
  }
}

at::Tensor TrainStep::operator()(uint64_t seed, StepCost* cost) {
  const SeedRun run(seed);
  if (graph_ != nullptr && steps_ >= kEager) {
    if (cost != nullptr) fail("train", "memory must be measured in one of the first " + std::to_string(kEager) + " steps", "a later one");
    if (graph_->captured() || capture_or_fall_back()) {
      seed_torch_on(device_, seed);
      redraw_seeds(bank_);
      graph_->replay();
      ++steps_;
      return loss_;
    }
  }
  seed_torch_on(device_, seed);
  ++steps_;
  if (graph_ == nullptr) return eager(cost);
  at::Tensor loss;
  graph_->warm_up([&] { loss = eager(cost); });
  return loss;
}

at::Tensor TrainStep::eager(StepCost* cost) {
  const int64_t stood = optimizer_.clear_gradients();  // those of the step before: new ones take their place
  std::optional<MemoryMeter> meter;
  if (cost != nullptr) meter.emplace(device_);
  std::optional<SeedBank> bank;
  if (device_.is_cuda()) bank.emplace(draw_seeds(seeds_, device_));
  at::Tensor loss = forward_to_optimizer(meter ? &*meter : nullptr, cost);
  if (bank) seeds_ = bank->asked();
  if (meter) {
    cost->peak_bytes = meter->peak() - stood;
    peak_bytes_ = std::max(peak_bytes_, meter->peak());
  }
  return loss;
}

at::Tensor TrainStep::forward_to_optimizer(MemoryMeter* meter, StepCost* cost) {
  at::Tensor logits = parts_.forward();
  const int64_t logit_bytes = static_cast<int64_t>(logits.nbytes()) + (parts_.more_logit_bytes ? parts_.more_logit_bytes() : 0);
  const int64_t after_forward = meter != nullptr ? meter->requested() : 0;
  at::Tensor loss = parts_.loss(logits);
  logits.reset();
  if (meter != nullptr) {
    cost->saved_bytes = after_forward - logit_bytes;
    cost->loss_bytes = meter->requested() - cost->saved_bytes;
    cost->tensors = packed_tensors(loss);
  }
  optimizer_.scaled(loss).backward();
  optimizer_.step();
  return optimizer_.marked(loss.detach());
}

bool TrainStep::capture_or_fall_back() {
  try {
    if (may_fall_back_ && free_memory(device_) < 2 * peak_bytes_)
      fail("train", "a CUDA graph needs twice the " + std::to_string(peak_bytes_) + " bytes of a step to be free", free_memory(device_));
    capture();
    return true;
  } catch (const std::exception& e) {
    if (!may_fall_back_) throw;
    const std::string what = e.what();
    eager_because_ = what.substr(0, what.find('\n'));
  }
  graph_.reset();
  loss_.reset();
  bank_.reset();
  optimizer_.clear_gradients();
  release_cached_memory(device_);
  return false;
}

void TrainStep::capture() {
  optimizer_.clear_gradients();
  bank_ = at::empty({seeds_}, at::TensorOptions().dtype(at::kLong).device(device_));
  graph_->capture([&] {
    const SeedRun apart(0);  // the capture's backward ends a step of its own: the first replay's seeds are those of an eager step
    const SeedBank bank(bank_, SeedBank::End::refuses);
    loss_ = forward_to_optimizer(nullptr, nullptr);
  });
}

}  // namespace satchel
