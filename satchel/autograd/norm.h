// Norms that keep their normalised values (or, layer by layer, their input) packed. x is float32, bfloat16 or float16, and so is what comes
// out, but for layer_norm, rms_norm and group_norm under CUDA's autocast: float32, as torch's. Weights and statistics are float32.
//
// In shared methods a norm packs when it is known who reads its output: a relu() that comes next keeps one save for both, which the layer
// after it shares (theory.md 10), a gelu() and its like keep what a norm by row needs beside their derivative, a conv() or linear() shares
// the norm's own, and anything else makes the norm pack for itself alone.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/autograd/save_policy.h"

namespace satchel {

struct NormWeights {
  at::Tensor gamma, beta;                // one a channel; undefined: 1 and 0
  at::Tensor running_mean, running_var;  // BatchNorm: updated in training; may be undefined
};

struct NormOptions {
  double eps = 1e-5;
  double momentum = 0.1;
  bool training = true;  // BatchNorm: statistics of the batch, else the running ones
};

/// Of rows × channels over rows, or of maps N×C×spatial (3 to 5 dimensions) over all but channels. Maps come back in channels_last order.
at::Tensor batch_norm(const at::Tensor& x, const NormWeights& weights, const NormOptions& options = {}, const SavePolicy& saving = {});

/// Of rows × channels, over channels.
at::Tensor layer_norm(const at::Tensor& x, const NormWeights& weights, const NormOptions& options = {}, const SavePolicy& saving = {});
/// Over the last dimensions of x, which are `shape`, as are γ and β.
at::Tensor layer_norm(const at::Tensor& x, at::IntArrayRef shape, const NormWeights& weights, const NormOptions& options = {},
                      const SavePolicy& saving = {});

/// x·γ over the root of the mean of x² over the last dimensions, which are `shape`, as γ is; undefined γ: 1. torch's default for eps, the
/// machine's, is far below what 2 bits see.
at::Tensor rms_norm(const at::Tensor& x, at::IntArrayRef shape, const at::Tensor& gamma, double eps = 1e-6, const SavePolicy& saving = {});

/// Of rows × channels or of maps, over each sample's values of channels / groups neighbouring channels.
at::Tensor group_norm(const at::Tensor& x, int64_t groups, const NormWeights& weights, const NormOptions& options = {},
                      const SavePolicy& saving = {});

}  // namespace satchel
