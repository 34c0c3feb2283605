// Norms that keep their normalised values (or, layer by layer, their input) packed. x is float32 or bfloat16, and so is what comes out;
// weights and statistics are float32.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/autograd/saving.h"

namespace satchel {

struct NormWeights {
  at::Tensor gamma, beta;                // one a channel
  at::Tensor running_mean, running_var;  // BatchNorm: updated in training; may be undefined
};

struct NormOptions {
  double eps = 1e-5;
  double momentum = 0.1;
  bool training = true;  // BatchNorm: statistics of the batch, else the running ones
};

/// Of rows × channels, over rows.
at::Tensor batch_norm(const at::Tensor& x, const NormWeights& weights, const NormOptions& options = {}, const Saving& saving = {});
/// Of rows × channels, over channels.
at::Tensor layer_norm(const at::Tensor& x, const NormWeights& weights, const NormOptions& options = {}, const Saving& saving = {});

}  // namespace satchel
