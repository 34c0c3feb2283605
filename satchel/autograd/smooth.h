// Smooth activations. Each keeps its derivative, stochastically rounded: the gradient is linear in it, so it is right on average, which it
// would not be from a rounded input (theory.md 8).
//
// The derivative stands in blocks of 3 bits where norms have at most 2, else of 4 or of the norms' bits (core/keep.cpp). Its range r is at
// most 1.26 (GELU's runs from −.13 to 1.13, SiLU's from −.10 to 1.10, tanh's from 0 to 1, sigmoid's from 0 to .25), so with B = 2^bits − 1
// steps a value's rounding has a variance of at most r²/(4·B²) (theory.md 1): at 3 bits a deviation of .09 or less, next to derivatives of
// order 1; 2 bits would give .21.
//
// In shared methods an activation that reads a norm by row (LayerNorm, RMSNorm) claims it, and one node keeps what both need: on CUDA one
// pass each way. Bytes, names in reports and seeds are those of the two functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "satchel/autograd/save_policy.h"

namespace satchel {

/// `approximate`: "none" or "tanh", as torch's.
at::Tensor gelu(const at::Tensor& x, std::string_view approximate = "none", const SavePolicy& saving = {});
at::Tensor silu(const at::Tensor& x, const SavePolicy& saving = {});
at::Tensor sigmoid(const at::Tensor& x, const SavePolicy& saving = {});
at::Tensor tanh(const at::Tensor& x, const SavePolicy& saving = {});

}  // namespace satchel
