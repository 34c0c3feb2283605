#include "satchel/train/metrics.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/max.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "satchel/core/error.h"

namespace satchel {
namespace {

constexpr const char* kOp = "metric";

void check(const at::Tensor& t, const char* name, const at::Tensor& scores) {
  if (!t.defined()) fail(kOp, std::string(name) + " must be defined", "an undefined tensor");
  if (t.layout() != at::kStrided) fail(kOp, std::string(name) + " must be strided", t.layout());
  if (!t.is_cpu() && !t.is_cuda()) fail(kOp, std::string(name) + " must be on cpu or cuda", t.device());
  if (t.device() != scores.device()) fail(kOp, std::string(name) + " must be on the scores' device", t.device());
}

bool is_number(at::ScalarType type) { return at::isFloatingType(type) || at::isIntegralType(type, true); }

/// Values below `low` or above `high` are refused.
void check_range(const at::Tensor& t, const char* name, int64_t low, int64_t high) {
  const auto [least, most] = at::aminmax(t);
  const auto a = least.item<int64_t>(), b = most.item<int64_t>();
  if (a < low || b > high) {
    fail(kOp, std::string(name) + " must be " + std::to_string(low) + " to " + std::to_string(high), a < low ? a : b);
  }
}

/// Scores, what is true, and nodes: all three fit each other, and nodes exist.
void check_all(const at::Tensor& scores, const char* score_name, const at::Tensor& truth, const char* truth_name, const at::Tensor& index) {
  check(scores, score_name, scores);
  check(truth, truth_name, scores);
  check(index, "index", scores);
  if (!at::isFloatingType(scores.scalar_type()))
    fail(kOp, std::string(score_name) + " must be floats", c10::toString(scores.scalar_type()));
  if (!is_number(truth.scalar_type())) fail(kOp, std::string(truth_name) + " must be real numbers", c10::toString(truth.scalar_type()));
  if (index.scalar_type() != at::kLong && index.scalar_type() != at::kInt) {
    fail(kOp, "index must be int32 or int64", c10::toString(index.scalar_type()));
  }
  if (index.dim() != 1 || index.numel() == 0) fail(kOp, "index must be a line of one node or more", index.sizes());
  if (scores.dim() < 1) fail(kOp, std::string(score_name) + " must have a row a node", scores.sizes());
  check_range(index, "index", 0, scores.size(0) - 1);
}

at::Tensor rows(const at::Tensor& t, const at::Tensor& index) { return at::index_select(t.detach(), 0, index); }

/// The rows of `truth`; refuses what is neither 0 nor 1.
at::Tensor binary_rows(const at::Tensor& truth, const char* name, const at::Tensor& index) {
  const at::Tensor chosen = rows(truth, index), on = chosen.ne(0);
  const at::Tensor odd = on.logical_and(chosen.ne(1));
  if (odd.any().item<bool>()) fail(kOp, std::string(name) + " must be 0 or 1", chosen.masked_select(odd)[0].item<double>());
  return on;
}

/// Area under the curve from sorted pairs; `positive` of them are true. Ranks count from 1; equal scores share the mean of theirs.
double area(const std::vector<std::pair<double, bool>>& sorted, int64_t positive) {
  const auto n = static_cast<int64_t>(sorted.size());
  double ranks = 0;
  for (int64_t first = 0; first < n;) {
    int64_t last = first, hits = 0;
    for (; last < n && sorted[static_cast<size_t>(last)].first == sorted[static_cast<size_t>(first)].first; ++last) {
      hits += sorted[static_cast<size_t>(last)].second;
    }
    ranks += static_cast<double>(hits) * (static_cast<double>(first + 1 + last) / 2);
    first = last;
  }
  const auto p = static_cast<double>(positive), q = static_cast<double>(n - positive);
  return (ranks - p * (p + 1) / 2) / (p * q);
}

}  // namespace

double accuracy(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& index) {
  const at::NoGradGuard no_grad;
  check_all(logits, "logits", labels, "labels", index);
  if (logits.dim() != 2 || logits.size(1) < 1) fail(kOp, "logits must be nodes × classes", logits.sizes());
  if (at::isFloatingType(labels.scalar_type())) fail(kOp, "labels must be integers", c10::toString(labels.scalar_type()));
  if (labels.dim() != 1 || labels.size(0) != logits.size(0)) fail(kOp, "labels must be one a node", labels.sizes());
  const at::Tensor truth = rows(labels, index).to(at::kLong);
  check_range(truth, "labels", 0, logits.size(1) - 1);
  const auto [best, place] = at::max(rows(logits, index), 1);
  const at::Tensor right = place.eq(truth).logical_and(best.isnan().logical_not());  // max finds NaN where there is one
  return 100.0 * static_cast<double>(right.sum().item<int64_t>()) / static_cast<double>(index.numel());
}

double micro_f1(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& index) {
  const at::NoGradGuard no_grad;
  check_all(logits, "logits", targets, "targets", index);
  if (logits.dim() != 2) fail(kOp, "logits must be nodes × labels", logits.sizes());
  if (targets.sizes() != logits.sizes()) fail(kOp, "targets must have the logits' sizes", targets.sizes());
  const at::Tensor predicted = rows(logits, index).gt(0), truth = binary_rows(targets, "targets", index);
  const auto hits = predicted.logical_and(truth).sum().item<int64_t>();
  const int64_t both = predicted.sum().item<int64_t>() + truth.sum().item<int64_t>();
  return both == 0 ? 0.0 : 200.0 * static_cast<double>(hits) / static_cast<double>(both);
}

double roc_auc(const at::Tensor& scores, const at::Tensor& labels, const at::Tensor& index) {
  const at::NoGradGuard no_grad;
  check_all(scores, "scores", labels, "labels", index);
  if (scores.numel() != scores.size(0)) fail(kOp, "scores must be one a node", scores.sizes());
  if (labels.dim() < 1 || labels.size(0) != scores.size(0) || labels.numel() != scores.size(0)) {
    fail(kOp, "labels must be one a node", labels.sizes());
  }
  const at::Tensor truth = binary_rows(labels, "labels", index).to(at::kCPU).contiguous();
  const at::Tensor score = rows(scores, index).to(at::kCPU, at::kDouble).contiguous();
  const bool* on = truth.const_data_ptr<bool>();
  const double* value = score.const_data_ptr<double>();
  std::vector<std::pair<double, bool>> pairs;
  int64_t positive = 0;
  for (int64_t i = 0; i < score.numel(); ++i) {
    if (std::isnan(value[i])) return std::numeric_limits<double>::quiet_NaN();
    pairs.emplace_back(value[i], on[i]);
    positive += on[i];
  }
  if (positive == 0 || positive == score.numel()) fail(kOp, "both classes must be among the nodes", positive == 0 ? "0 only" : "1 only");
  std::sort(pairs.begin(), pairs.end());
  return 100.0 * area(pairs, positive);
}

void add_confusion(const at::Tensor& confusion, const at::Tensor& predicted, const at::Tensor& truth, int64_t ignored) {
  const at::NoGradGuard no_grad;
  const int64_t classes = confusion.size(0);
  if (predicted.sizes() != truth.sizes()) fail("metric", "predictions must have the truth's sizes", predicted.sizes());
  const at::Tensor counted = truth.ne(ignored);
  const at::Tensor pairs = (truth.to(at::kLong) * classes + predicted).masked_select(counted);
  confusion.add_(at::bincount(pairs, {}, classes * classes).view({classes, classes}));
}

std::vector<double> class_ious(const at::Tensor& confusion) {
  const at::Tensor counts = confusion.to(at::kCPU, at::kDouble), hits = counts.diagonal();
  const at::Tensor ious = 100 * hits / (counts.sum(0) + counts.sum(1) - hits);  // 0/0 is NaN
  return {ious.const_data_ptr<double>(), ious.const_data_ptr<double>() + ious.numel()};
}

double mean_iou(const std::vector<double>& ious) {
  double sum = 0, count = 0;
  for (const double iou : ious) {
    if (std::isnan(iou)) continue;
    sum += iou;
    ++count;
  }
  return count > 0 ? sum / count : std::nan("");
}

}  // namespace satchel
