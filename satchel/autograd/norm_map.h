// BatchNorm of a map for methods that keep each function's own, with what comes right after it: a residual sum, ReLU or LeakyReLU. One node
// with the lines of norm and mask; on CUDA one pass each way where the kernels fit. The normalised values are coded, not x: blocks of
// neighbouring values run across channels, and a channel of small deviation would drown in the range of the others. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/autograd/norm_act.h"

namespace satchel {

/// Does norm_map() serve? Training on maps with gradients recorded, and a method that codes normalised values layer by layer.
bool serves_norm_map(const at::Tensor& x, const NormWeights& weights, const NormOptions& options, const Saving& saving);

struct NormMapOptions {
  bool activates = true;
  double slope = 0;      // of what is off: ReLU's, or LeakyReLU's
  at::Tensor skip = {};  // x's sizes and type, before the activation; undefined: nothing is added
};
/// act(norm(x) + skip); all is checked, and serves_norm_map() is true. `spare`: x's own memory, where the output may be written over it.
at::Tensor norm_map(const at::Tensor& x, const NormWeights& weights, const NormOptions& options, const NormMapOptions& after,
                    const Saving& saving, const at::Tensor& spare = {});

}  // namespace satchel
