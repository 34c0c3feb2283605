// Activations and dropout that keep a bit a value, or less; smooth ones are in smooth.h. Maps (4 or 5 dimensions, or 3 in channels_last
// order) come back in channels_last order.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/autograd/save_policy.h"

namespace satchel {

/// Keeps one exact bit a value: on where x > 0, so no gradient passes at NaN (the output still shows it). In shared methods it keeps its
/// output's ReLU form, which tells that bit and serves the next layer as well (theory.md 10); where x is the untouched output of the norm
/// called last, it takes over what the norm would keep, and there is one save for all three.
at::Tensor relu(const at::Tensor& x, const SavePolicy& saving = {});
/// Keeps the bit; after a norm in shared methods as relu().
at::Tensor leaky_relu(const at::Tensor& x, double slope = 0.01, const SavePolicy& saving = {});

/// min(max(x, 0), 6). Keeps one exact bit a value: on where the gradient passes, as torch's does, between 0 and 6 and at NaN.
at::Tensor relu6(const at::Tensor& x, const SavePolicy& saving = {});

/// Keeps its output as sign and value: its derivative is output + α where that is off (theory.md 8).
at::Tensor elu(const at::Tensor& x, double alpha = 1.0, const SavePolicy& saving = {});

/// p in [0, 1), rounded to a multiple of 2^−16. Keeps only the seed that redraws its mask (or the mask, a bit a value, where
/// the method says so). What x shares with the next layer, the output shares too.
at::Tensor dropout(const at::Tensor& x, double p = 0.5, bool training = true, const SavePolicy& saving = {});

/// Stochastic depth: each sample of the first dimension is 0 with the chance p, or multiplied by 1/(1 − p). p as dropout's. Keeps only the
/// seed.
at::Tensor drop_samples(const at::Tensor& x, double p, bool training = true, const SavePolicy& saving = {});

}  // namespace satchel
