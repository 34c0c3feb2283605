// BatchNorm → ReLU → dropout of rows as one node for methods that keep each function's own: the same bytes and lines as batch_norm(),
// relu() and dropout(), in one pass each way on CUDA. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/autograd/norm_act.h"

namespace satchel {

/// Does norm_chain() serve? Training on CUDA with gradients recorded, and a block code that the fused kernels fit.
bool fuses_norm_chain(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const Saving& saving);

/// All is checked, and fuses_norm_chain() is true. Seeds are drawn as by the three functions: the code's, then dropout's. `into`: x's own
/// memory, where the output may be written over it.
at::Tensor norm_chain(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const Saving& saving,
                      const at::Tensor& into = {});

}  // namespace satchel
