// Tensors and methods for tests of the rooms over torch.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>

#include <string>

#include "satchel/autograd/save_policy.h"

namespace satchel::test {

/// Normal values that want a gradient.
inline at::Tensor leaf(at::IntArrayRef shape, at::ScalarType type = at::kFloat) { return at::randn(shape).to(type).requires_grad_(); }

inline SavePolicy saving_of(const std::string& method) { return {parse_method(method), "layer"}; }

}  // namespace satchel::test
