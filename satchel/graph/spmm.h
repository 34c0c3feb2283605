// A·x as a function with a gradient. A is fixed, so nothing is kept.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/graph/csr.h"

namespace satchel {

/// x is columns of A × any width, float32, on A's device. The gradient is Aᵀ·g.
at::Tensor spmm(const Adjacency& a, const at::Tensor& x);

}  // namespace satchel
