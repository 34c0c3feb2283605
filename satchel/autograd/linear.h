// x·Wᵀ + b that keeps x packed for the gradient of W.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/autograd/saving.h"

namespace satchel {

/// As torch::linear: x is … × in, weight out × in, bias out (or undefined). x is kept only where the weight needs a gradient.
/// bfloat16 x with float32 weights: products in bfloat16 with float32 sums, gradients of weight and bias in float32.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {}, const Saving& saving = {});

}  // namespace satchel
