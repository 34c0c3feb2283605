#include "satchel/autograd/node.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <mutex>

#include "satchel/core/error.h"
#include "satchel/tensor/pack.h"

namespace satchel {

at::Tensor fresh_seed(at::Device device) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return seed_tensor(at::check_generator<at::CPUGeneratorImpl>(generator)->random64(), device);
}

void check_dropout(double p, const char* op) {
  if (!(p >= 0) || std::round(p * 65536) >= 65536) fail(op, "dropout must be at least 0 and less than 1", p);
}

double dropout_scale(double p) { return 65536 / (65536 - std::round(p * 65536)); }

variable_list SavingNode::apply(variable_list&& gradients) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (released_) fail(op_, "backward through the same graph twice needs retain_graph = true");
  if (at::GradMode::is_enabled()) fail(op_, "gradients of gradients are not offered: create_graph must be false");
  at::Tensor gradient = std::move(gradients.at(0));
  gradients.clear();
  if (!gradient.defined()) return variable_list(num_outputs());
  return back(std::move(gradient));
}

void SavingNode::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  released_ = true;
  release();
}

SavedTensor saved_line(const std::string& name, const char* kind, const at::Tensor& kept) {
  const auto bytes = static_cast<int64_t>(kept.nbytes());
  return {name, kind, kept.sizes().vec(), static_cast<int>(8 * kept.element_size()), bytes, bytes};
}

at::Tensor own(at::Tensor&& g) {
  const bool alone = g.use_count() == 1 && g.storage().use_count() == 1 && g.is_contiguous();
  return alone ? std::move(g) : g.clone(at::MemoryFormat::Contiguous);
}

}  // namespace satchel
