#include "satchel/autograd/node.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>

#include "satchel/autograd/input.h"
#include "satchel/autograd/step.h"
#include "satchel/core/error.h"
#include "satchel/tensor/epilogue.h"

namespace satchel {
namespace {

struct Deferred {
  std::weak_ptr<SavingNode> norm;
  bool taken = false;  // a reader has come
};
Deferred& deferred() { return step_context().part<Deferred>(); }

}  // namespace

void defer(const std::shared_ptr<SavingNode>& norm) {
  const std::shared_ptr<SavingNode> older = deferred().norm.lock();
  deferred() = {norm, false};
  if (older != nullptr) older->pack_deferred();
}

std::shared_ptr<SavingNode> deferred_norm() { return deferred().taken ? nullptr : deferred().norm.lock(); }

void claim_deferred() { deferred().taken = true; }

void flush_deferred() {
  const std::shared_ptr<SavingNode> norm = deferred().norm.lock();
  if (norm == nullptr || (deferred().taken && norm->may_stay_deferred())) return;
  deferred() = {};
  norm->pack_deferred();
}

void check_no_autocast(const at::Tensor& x, const char* op) {
  if (at::autocast::is_autocast_enabled(x.device().type())) fail(op, "autocast must be off for " + x.device().str() + " here", "on");
}

std::vector<SavedTensor> SavingNode::saved() {
  const std::shared_ptr<Node> self = shared_from_this();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (released_) return {};
  if (!may_stay_deferred()) pack_now();
  return lines();
}

void SavingNode::pack_deferred() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!released_) pack_now();
}

variable_list SavingNode::apply(variable_list&& gradients) {
  const std::lock_guard<std::mutex> lock(mutex_);
  clock_->backward_begins(torch::autograd::get_current_graph_task_id());
  if (released_) fail(op_, "backward through the same graph twice needs retain_graph = true");
  if (at::GradMode::is_enabled()) fail(op_, "gradients of gradients are not offered: create_graph must be false");
  at::Tensor gradient = std::move(gradients.at(0));
  gradients.clear();
  if (!gradient.defined()) return back_of_nothing();
  const NoAutocast no_autocast;
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

at::Tensor column_sums(const at::Tensor& g) {
  if (sums_columns(g)) return sum_columns(g);
  const bool known = g.scalar_type() == at::kFloat || g.scalar_type() == at::kHalf || g.scalar_type() == at::kBFloat16;
  if (!g.is_cuda() || !known) return g.sum(at::IntArrayRef{0}, /*keepdim=*/false, at::kFloat);
  return product(at::ones({1, g.size(0)}, g.options()), g).squeeze(0);
}

at::Tensor take_or_clone(at::Tensor&& g) {
  const bool alone = g.use_count() == 1 && g.storage().use_count() == 1 && g.is_contiguous();
  return alone ? std::move(g) : g.clone(at::MemoryFormat::Contiguous);
}

}  // namespace satchel
