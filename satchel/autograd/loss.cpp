#include "satchel/autograd/loss.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nll_loss.h>

#include <sstream>
#include <utility>

#include "satchel/autograd/node.h"
#include "satchel/core/error.h"

namespace satchel {
namespace {

/// Holds the logits' memory, which has become their gradient.
class LossNode : public SavingNode {
 public:
  explicit LossNode(const std::string& layer) : SavingNode("loss", layer) {}
  at::Tensor gradient;
  uint32_t version = 0;  // of the logits' memory when it became their gradient

  std::vector<SavedTensor> lines() const override { return {saved_line(layer(), "loss", gradient)}; }

 protected:
  variable_list back(at::Tensor g) override {
    if (gradient._version() != version) fail(op(), "logits must not change, nor serve a second loss, between a loss and its backward");
    if (!is_last_use()) return {gradient.mul(g)};
    return {std::exchange(gradient, {}).mul_(g)};
  }
  void release() override { gradient.reset(); }
};

std::string text_of(const at::Tensor& t) {
  if (!t.defined()) return "nothing";
  std::ostringstream text;
  text << c10::toString(t.scalar_type()) << ' ' << t.sizes();
  return text.str();
}

void check_logits(const at::Tensor& logits, const at::Tensor& index, const char* op) {
  if (!logits.defined() || logits.dim() != 2 || !logits.is_floating_point()) fail(op, "logits must be a matrix of floats", text_of(logits));
  const at::TensorBase& base = logits.is_view() ? logits._base() : logits;
  if (at::GradMode::is_enabled() && base.requires_grad() && base.is_leaf()) {
    fail(op, "logits must be computed, since they are written over", logits.is_view() ? "a view of a leaf" : "a leaf");
  }
  if (!index.defined()) return;
  if (index.scalar_type() != at::kLong || index.dim() != 1) fail(op, "index must be one line of int64", text_of(index));
  if (index.numel() == 0) fail(op, "index must name at least one row", 0);
}

/// Row gradients `rows` into the logits' memory, zero elsewhere; the loss with its node.
at::Tensor finish(const at::Tensor& logits, const at::Tensor& rows, const at::Tensor& index, const at::Tensor& loss,
                  const std::string& name) {
  const auto node = make_node<LossNode>(name, logits);
  const at::Tensor memory = logits.detach();
  if (index.defined()) {
    memory.zero_().index_copy_(0, index, rows);
  } else {
    memory.copy_(rows);
  }
  torch::autograd::impl::bump_version(logits);
  node->gradient = memory;
  node->version = logits._version();
  return attach(loss, node);
}

at::Tensor rows_of(const at::Tensor& x, const at::Tensor& index) { return index.defined() ? x.index_select(0, index) : x; }

}  // namespace

at::Tensor cross_entropy_(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& index, const std::string& name) {
  constexpr const char* op = "cross_entropy_";
  check_logits(logits, index, op);
  if (!labels.defined() || labels.scalar_type() != at::kLong || labels.dim() != 1 || labels.size(0) != logits.size(0)) {
    fail(op, "labels must be " + std::to_string(logits.size(0)) + " int64 numbers", text_of(labels));
  }
  const bool recorded = records(logits);
  const at::NoGradGuard no_grad;
  const at::Tensor wanted = rows_of(labels, index);
  at::Tensor rows = at::_log_softmax(rows_of(logits.detach(), index), 1, /*half_to_float=*/false);
  const at::Tensor loss = at::nll_loss(rows, wanted);
  if (!recorded) return loss;
  const at::Tensor at = wanted.unsqueeze(1);
  rows.exp_();
  rows.scatter_add_(1, at, at::full({at.size(0), 1}, -1, rows.options()));
  rows.div_(static_cast<double>(rows.size(0)));
  const at::AutoGradMode grad(true);
  return finish(logits, rows, index, loss, name);
}

at::Tensor binary_cross_entropy_(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& index, const std::string& name) {
  constexpr const char* op = "binary_cross_entropy_";
  check_logits(logits, index, op);
  if (!targets.defined() || targets.sizes() != logits.sizes() || !targets.is_floating_point()) {
    fail(op, "targets must be floats of the logits' shape", text_of(targets));
  }
  const bool recorded = records(logits);
  const at::NoGradGuard no_grad;
  const at::Tensor wanted = rows_of(targets, index);
  at::Tensor rows = rows_of(logits.detach(), index);
  const at::Tensor loss = at::binary_cross_entropy_with_logits(rows, wanted);
  if (!recorded) return loss;
  rows = rows.sigmoid().sub_(wanted).div_(static_cast<double>(rows.numel()));
  const at::AutoGradMode grad(true);
  return finish(logits, rows, index, loss, name);
}

}  // namespace satchel
