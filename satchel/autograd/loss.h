// Losses that keep the gradient of the logits for backward and nothing else: those with an underscore in the logits' own memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "satchel/autograd/save_policy.h"

namespace satchel {

/// Mean cross-entropy of rows `index` (int64; undefined: all) of logits (rows × classes) against labels (int64, one a row of
/// logits), which must be 0 to classes − 1 where they are read. A row that the index names twice counts twice. The gradient of the logits
/// is kept, as large as they are; they stay as they are. Gradients, not the loss, are `scale` times what they are: in float16 those of a
/// mean over many rows would vanish. A power of two changes no other bit of them.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& index = {}, const std::string& name = "loss",
                         double scale = 1);

/// The same without memory of its own: where a gradient is recorded the logits' memory holds their gradient afterwards. Read what else you
/// need first. One loss a set of logits; grad() with respect to the logits gives back that very memory.
at::Tensor cross_entropy_(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& index = {},
                          const std::string& name = "loss", double scale = 1);

/// Labels of which some count: made once, read by every step.
struct MaskedLabels {
  at::Tensor labels;  // int64, one a row; −100: the row does not count
  int64_t rows = 0;   // that count
};
/// A copy of labels in which only rows `index` (undefined: all) count, less those whose label is −100 already. Looks at the numbers,
/// so it waits for the device.
MaskedLabels masked_labels(const at::Tensor& labels, const at::Tensor& index = {});

/// Mean cross-entropy (float32) of the rows that count; else as above. On CUDA one pass over the logits, without waiting for the
/// device: a label past the last class shows there as NaN in the loss and in its row.
at::Tensor cross_entropy(const at::Tensor& logits, const MaskedLabels& labels, const std::string& name = "loss", double scale = 1);
at::Tensor cross_entropy_(const at::Tensor& logits, const MaskedLabels& labels, const std::string& name = "loss", double scale = 1);

/// The same with sigmoids: mean over rows and columns against targets (logits' shape, 0 to 1).
at::Tensor binary_cross_entropy_(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& index = {},
                                 const std::string& name = "loss", double scale = 1);

/// The loss itself, whose gradients are `scale` times what they would be.
at::Tensor with_scaled_gradient(const at::Tensor& loss, double scale);

}  // namespace satchel
