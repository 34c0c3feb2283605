// What a task is scored by, in percent, over chosen nodes, or over pixels. Tensors are on one device, any; no gradient is kept.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace satchel {

/// Share of nodes whose largest logit is their label's. Logits are nodes × classes, labels integers, one a node. A row that
/// has NaN is wrong.
double accuracy(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& index);

/// 2·hits / (predicted + true) over all labels of all nodes; predicted is a logit above 0. Both are nodes × labels; targets are 0
/// or 1 of any type. 0 where nothing is predicted and nothing true.
double micro_f1(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& index);

/// Chance that a node of class 1 scores above one of class 0, a tie counting half. One score and one label, 0 or 1, a node.
/// Throws `[metric] …` where a class is absent; NaN where a score is.
double roc_auc(const at::Tensor& scores, const at::Tensor& labels, const at::Tensor& index);

/// Counts pixels into `confusion`, int64 classes × classes of truth by prediction. Predictions are int64, truth uint8 of the same shape:
/// pixels whose truth is `ignored` do not count.
void add_confusion(const at::Tensor& confusion, const at::Tensor& predicted, const at::Tensor& truth, int64_t ignored);

/// Hits / (truth + predicted − hits) of each class, in percent; NaN for a class that is in neither.
std::vector<double> class_ious(const at::Tensor& confusion);
/// The mean over those that are not NaN; NaN where all are.
double mean_iou(const std::vector<double>& ious);

}  // namespace satchel
