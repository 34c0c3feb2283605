// A map times one number a channel of each sample, which a branch of its own makes: the gate of squeeze-and-excitation blocks.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/autograd/save_policy.h"

namespace satchel {

/// x is N×C×spatial, `scale` N×C×1×1 … of x's type. The gradient of `scale` is a sum of g·x, linear in x, which is kept as the method keeps
/// inputs of layers: it is right on average. That of x is g·scale; `scale` is small and is kept as it is. In methods whose layers share, a
/// convolution that reads the product rebuilds it from both, and keeps nothing.
at::Tensor gate(const at::Tensor& x, const at::Tensor& scale, const SavePolicy& saving = {});

}  // namespace satchel
