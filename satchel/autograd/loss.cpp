#include "satchel/autograd/loss.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <cstdint>
#include <span>
#include <sstream>
#include <utility>
#include <vector>

#include "satchel/autograd/node.h"
#include "satchel/core/error.h"
#include "satchel/tensor/loss.h"

namespace satchel {
namespace {

/// Where the gradient of the logits stands until backward: in memory of its own, or in theirs.
enum class Logits : uint8_t { stay, are_overwritten };

/// Holds the gradient of the logits.
class LossNode : public SavingNode {
 public:
  explicit LossNode(const std::string& layer) : SavingNode("loss", layer) {}
  at::Tensor gradient;
  uint32_t version = 0;  // of that memory when it became the gradient

  std::vector<SavedTensor> lines() const override { return {saved_line(layer(), "loss", gradient)}; }

 protected:
  variable_list back(at::Tensor g) override {
    if (gradient._version() != version) fail(op(), "logits must not change, nor serve a second loss, between a loss and its backward");
    if (!is_last_use()) return {gradient.mul(g)};
    at::Tensor last = std::exchange(gradient, {});
    scale_(last, g);
    return {last};
  }
  void release() override { gradient.reset(); }
};

class ScaleNode : public SavingNode {
 public:
  explicit ScaleNode(const std::string& layer) : SavingNode("scale", layer) {}
  double scale = 1;

  std::vector<SavedTensor> lines() const override { return {}; }

 protected:
  variable_list back(at::Tensor g) override { return {g.mul(scale)}; }
  void release() override {}
};

void check_scale(double scale, const char* op) {
  if (!(scale > 0) || !std::isfinite(scale)) fail(op, "scale must be finite and above 0", scale);
}

std::string text_of(const at::Tensor& t) {
  if (!t.defined()) return "nothing";
  std::ostringstream text;
  text << c10::toString(t.scalar_type()) << ' ' << t.sizes();
  return text.str();
}

void check_index(const at::Tensor& index, const char* op) {
  if (!index.defined()) return;
  if (index.scalar_type() != at::kLong || index.dim() != 1) fail(op, "index must be one line of int64", text_of(index));
  if (index.numel() == 0) fail(op, "index must name at least one row", 0);
}

void check_labels(const at::Tensor& labels, int64_t rows, const char* op) {
  if (!labels.defined() || labels.scalar_type() != at::kLong || labels.dim() != 1 || labels.size(0) != rows) {
    fail(op, "labels must be " + std::to_string(rows) + " int64 numbers", text_of(labels));
  }
}

/// Numbers on the CPU that index or label rows must be 0 to count − 1. On a GPU looking at them would wait for it.
void check_numbers(const at::Tensor& numbers, int64_t count, const char* name, const char* op) {
  if (!numbers.is_cpu() || numbers.numel() == 0) return;
  const auto low = numbers.min().item<int64_t>(), high = numbers.max().item<int64_t>();
  if (low < 0 || high >= count) fail(op, std::string(name) + " must be 0 to " + std::to_string(count - 1), low < 0 ? low : high);
}

void check_logits(const at::Tensor& logits, const at::Tensor& index, Logits memory, const char* op) {
  if (!logits.defined() || logits.dim() != 2 || !logits.is_floating_point()) fail(op, "logits must be a matrix of floats", text_of(logits));
  const at::TensorBase& base = logits.is_view() ? logits._base() : logits;
  if (memory == Logits::are_overwritten && at::GradMode::is_enabled() && base.requires_grad() && base.is_leaf()) {
    fail(op, "logits must be computed, since they are written over", logits.is_view() ? "a view of a leaf" : "a leaf");
  }
  check_index(index, op);
  if (!index.defined()) return;
  if (index.device() != logits.device()) fail(op, "index must be on the logits' device", index.device());
  check_numbers(index, logits.size(0), "index", op);
}

/// Half-width logits are computed with in float32, as torch's autocast does.
at::Tensor wide(const at::Tensor& x) { return at::isReducedFloatingType(x.scalar_type()) ? x.to(at::kFloat) : x; }

/// The loss with its node, which keeps the gradient.
at::Tensor with_node(const at::Tensor& logits, const at::Tensor& gradient, const at::Tensor& loss, const std::string& name) {
  const at::AutoGradMode grad(true);
  const auto node = make_node<LossNode>(name, logits);
  if (gradient.is_alias_of(logits)) torch::autograd::impl::bump_version(logits);
  node->gradient = gradient;
  node->version = gradient._version();
  return attach(loss, node);
}

/// Does a row come twice? Numbers on the CPU, 0 to rows − 1.
bool repeats(const at::Tensor& index, int64_t rows) {
  std::vector<bool> seen(static_cast<size_t>(rows));
  const at::Tensor line = index.contiguous();
  for (const int64_t row : std::span(line.const_data_ptr<int64_t>(), static_cast<size_t>(line.numel()))) {
    if (seen[static_cast<size_t>(row)]) return true;
    seen[static_cast<size_t>(row)] = true;
  }
  return false;
}

/// Row gradients `rows` as the gradient of the logits, zero elsewhere; the loss with its node.
at::Tensor finish(const at::Tensor& logits, const at::Tensor& rows, const at::Tensor& index, const at::Tensor& loss,
                  const std::string& name, Logits memory) {
  const at::Tensor values = rows.to(logits.scalar_type());
  const bool over = memory == Logits::are_overwritten;
  if (!index.defined()) return with_node(logits, over ? logits.detach().copy_(values) : values, loss, name);
  const at::Tensor gradient = over ? logits.detach().zero_() : at::zeros_like(logits);
  if (index.is_cpu() && !repeats(index, logits.size(0))) {
    gradient.index_copy_(0, index, values);  // several times as fast there
  } else {
    gradient.index_add_(0, index, values);
  }
  return with_node(logits, gradient, loss, name);
}

at::Tensor rows_of(const at::Tensor& x, const at::Tensor& index) { return index.defined() ? x.index_select(0, index) : x; }

const char* op_of(Logits memory) { return memory == Logits::stay ? "cross_entropy" : "cross_entropy_"; }

at::Tensor row_entropy(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& index, const std::string& name, double scale,
                       Logits memory) {
  const char* op = op_of(memory);
  check_logits(logits, index, memory, op);
  check_scale(scale, op);
  check_labels(labels, logits.size(0), op);
  const bool recorded = needs_grad(logits);
  const at::NoGradGuard no_grad;
  const at::Tensor wanted = rows_of(labels, index);
  check_numbers(wanted, logits.size(1), "labels", op);
  at::Tensor rows = at::_log_softmax(wide(rows_of(logits.detach(), index)), 1, /*half_to_float=*/false);
  const at::Tensor loss = at::nll_loss(rows, wanted);
  if (!recorded) return loss;
  const at::Tensor at = wanted.unsqueeze(1);
  rows.exp_();
  rows.scatter_add_(1, at, at::full({at.size(0), 1}, -1, rows.options()));
  rows.div_(static_cast<double>(rows.size(0)) / scale);
  return finish(logits, rows, index, loss, name, memory);
}

at::Tensor masked_entropy(const at::Tensor& logits, const MaskedLabels& labels, const std::string& name, double scale, Logits memory) {
  const char* op = op_of(memory);
  check_logits(logits, {}, memory, op);
  check_scale(scale, op);
  check_labels(labels.labels, logits.size(0), op);
  if (labels.labels.device() != logits.device()) fail(op, "labels must be on the logits' device", labels.labels.device());
  if (labels.rows < 1 || labels.rows > logits.size(0)) {
    fail(op, "rows that count must be 1 to " + std::to_string(logits.size(0)), labels.rows);
  }
  if (!fuses_cross_entropy(logits)) {
    const at::Tensor index = labels.labels.ne(kIgnored).nonzero().squeeze(1);
    if (index.numel() != labels.rows) fail(op, "labels must have " + std::to_string(labels.rows) + " rows that count", index.numel());
    return row_entropy(logits, labels.labels, index.numel() == logits.size(0) ? at::Tensor() : index, name, scale, memory);
  }
  const bool recorded = needs_grad(logits);
  const at::NoGradGuard no_grad;
  const at::Tensor gradient = recorded && memory == Logits::stay ? logits.detach().clone() : logits.detach();
  const at::Tensor loss = cross_entropy_rows_(gradient, labels.labels, labels.rows, recorded, scale);
  return recorded ? with_node(logits, gradient, loss, name) : loss;
}

}  // namespace

MaskedLabels masked_labels(const at::Tensor& labels, const at::Tensor& index) {
  constexpr const char* op = "masked_labels";
  check_labels(labels, labels.defined() && labels.dim() == 1 ? labels.size(0) : 0, op);
  check_index(index, op);
  const at::NoGradGuard no_grad;
  at::Tensor chosen = at::ones_like(labels, at::kBool);
  if (index.defined()) {
    if (index.device() != labels.device()) fail(op, "index must be on the labels' device", index.device());
    const auto low = index.min().item<int64_t>(), high = index.max().item<int64_t>();
    if (low < 0 || high >= labels.size(0)) fail(op, "index must be 0 to " + std::to_string(labels.size(0) - 1), low < 0 ? low : high);
    chosen = at::zeros_like(chosen).index_fill_(0, index, true);
    if (const auto named = chosen.sum().item<int64_t>(); named != index.numel())
      fail(op, "index must name a row once: " + std::to_string(index.numel()) + " different ones", named);
  }
  MaskedLabels masked{labels.masked_fill(chosen.logical_not(), kIgnored), 0};
  const at::Tensor counts = masked.labels.ne(kIgnored);
  masked.rows = counts.sum().item<int64_t>();
  if (masked.rows == 0) fail(op, "at least one row must count", 0);
  if (const auto least = masked.labels.masked_select(counts).min().item<int64_t>(); least < 0) {
    fail(op, "labels must be 0 or more, or -100", least);
  }
  return masked;
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& index, const std::string& name,
                         double scale) {
  return row_entropy(logits, labels, index, name, scale, Logits::stay);
}

at::Tensor cross_entropy_(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& index, const std::string& name,
                          double scale) {
  return row_entropy(logits, labels, index, name, scale, Logits::are_overwritten);
}

at::Tensor cross_entropy(const at::Tensor& logits, const MaskedLabels& labels, const std::string& name, double scale) {
  return masked_entropy(logits, labels, name, scale, Logits::stay);
}

at::Tensor cross_entropy_(const at::Tensor& logits, const MaskedLabels& labels, const std::string& name, double scale) {
  return masked_entropy(logits, labels, name, scale, Logits::are_overwritten);
}

at::Tensor binary_cross_entropy_(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& index, const std::string& name,
                                 double scale) {
  constexpr const char* op = "binary_cross_entropy_";
  check_logits(logits, index, Logits::are_overwritten, op);
  check_scale(scale, op);
  if (!targets.defined() || targets.sizes() != logits.sizes() || !targets.is_floating_point()) {
    fail(op, "targets must be floats of the logits' shape", text_of(targets));
  }
  const bool recorded = needs_grad(logits);
  const at::NoGradGuard no_grad;
  const at::Tensor wanted = rows_of(targets, index);
  at::Tensor rows = wide(rows_of(logits.detach(), index));
  const at::Tensor loss = at::binary_cross_entropy_with_logits(rows, wanted);
  if (!recorded) return loss;
  rows = rows.sigmoid().sub_(wanted).div_(static_cast<double>(rows.numel()) / scale);
  return finish(logits, rows, index, loss, name, Logits::are_overwritten);
}

at::Tensor with_scaled_gradient(const at::Tensor& loss, double scale) {
  check_scale(scale, "loss");
  if (scale == 1 || !needs_grad(loss)) return loss;
  const auto node = make_node<ScaleNode>("loss", loss);
  node->scale = scale;
  return attach(loss.detach().clone(), node);
}

}  // namespace satchel
