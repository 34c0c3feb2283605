// What a task is scored by, in percent, over chosen nodes. Tensors are on one device, any; no gradient is kept.
#pragma once

#include <ATen/core/Tensor.h>

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

}  // namespace satchel
