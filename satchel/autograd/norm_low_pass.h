// BatchNorm [+ residual sum] [→ ReLU] of maps as one node for methods that keep the norm's input as a low-pass (DIVISION): the same bytes
// and lines as batch_norm() and relu(), two reads of the input forward and none of decoded values backward, on CUDA. Private to the
// library.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/autograd/norm_act.h"

namespace satchel {

/// Does norm_low_pass() serve? BatchNorm in training with ReLU or no activation on CUDA, gradients recorded, a map in channels_last order
/// whose low-pass the fused kernels fit. Dropout is not looked at. `skip` may be undefined; with it: ReLU, and x's type.
bool fuses_norm_low_pass(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const Saving& saving,
                         const at::Tensor& skip = {});

/// All is checked, and fuses_norm_low_pass() is true. The seed is drawn as by batch_norm(). `into`: x's own memory, where the output may be
/// written over it.
at::Tensor norm_low_pass(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const Saving& saving,
                         const at::Tensor& into = {}, const at::Tensor& skip = {});

}  // namespace satchel
