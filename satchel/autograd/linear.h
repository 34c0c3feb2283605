// x·Wᵀ + b that keeps x packed for the gradient of W.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/autograd/save_policy.h"

namespace satchel {

/// As torch::linear: x is … × in, weight out × in, bias out (or undefined). x is kept only where the weight needs a gradient.
/// bfloat16 or float16 x with float32 weights: products in x's type with float32 sums, gradients of weight and bias in float32. Under
/// autocast x counts as of autocast's type; its gradient comes back in its own.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {}, const SavePolicy& saving = {});

}  // namespace satchel
