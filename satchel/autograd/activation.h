// Activations and dropout that keep a bit a value, or less.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/autograd/saving.h"

namespace satchel {

/// Keep one exact bit a value: on where x > 0, so no gradient passes at NaN (the output still shows it).
at::Tensor relu(const at::Tensor& x, const Saving& saving = {});
at::Tensor leaky_relu(const at::Tensor& x, double slope = 0.01, const Saving& saving = {});

/// Keeps its output as sign and value: its derivative is output + α where that is off (theory.md 8).
at::Tensor elu(const at::Tensor& x, double alpha = 1.0, const Saving& saving = {});

/// p in [0, 1), rounded to a multiple of 2^−16. Keeps only the seed that redraws its mask (or the mask, a bit a value, where
/// the method says so).
at::Tensor dropout(const at::Tensor& x, double p = 0.5, bool training = true, const Saving& saving = {});

}  // namespace satchel
