#include "satchel/train/step.h"

#include <ATen/Context.h>

#include <optional>

#include "satchel/autograd/report.h"
#include "satchel/train/memory.h"

namespace satchel {

at::Tensor train_step(const StepParts& parts, ParameterStep& optimizer, at::Device device, uint64_t seed, StepCost* cost) {
  at::manual_seed(seed);
  const int64_t stood = optimizer.clear_gradients();  // those of the step before: new ones take their place
  std::optional<MemoryMeter> meter;
  if (cost != nullptr) meter.emplace(device);
  at::Tensor logits = parts.forward();
  const int64_t logit_bytes = static_cast<int64_t>(logits.nbytes());
  const int64_t after_forward = meter ? meter->allocated() : 0;
  at::Tensor loss = parts.loss(logits);
  logits.reset();
  if (meter) {
    cost->saved_bytes = after_forward - logit_bytes;
    cost->loss_bytes = meter->allocated() - cost->saved_bytes;
    cost->tensors = saved_tensors(loss);
  }

  loss.backward();
  optimizer.step();
  if (meter) cost->peak_bytes = meter->peak() - stood;
  return loss.detach();
}

}  // namespace satchel
