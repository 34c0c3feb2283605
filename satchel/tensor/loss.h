// The loss in one pass over the logits, and the pass that is spared where a gradient is multiplied by 1: CUDA. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "satchel/kernels/cuda/loss.h"

namespace satchel {

using cuda::kIgnored;

/// Do the fused kernels serve these logits (contiguous rows × classes of float32, bfloat16 or float16 on CUDA)?
bool fuses_cross_entropy(const at::Tensor& logits);

/// Mean cross entropy (float32) of the `counted` rows whose label (int64, one a row) is not kIgnored; with `write` the logits become
/// their gradient, `scale` times. A label out of range makes loss and row NaN.
at::Tensor cross_entropy_rows_(const at::Tensor& logits, const at::Tensor& labels, int64_t counted, bool write, double scale = 1);

/// x *= factor, one number on x's device. On CUDA a factor of 1 costs neither a pass nor a wait for its value.
void scale_(const at::Tensor& x, const at::Tensor& factor);

}  // namespace satchel
