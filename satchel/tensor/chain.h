// Norm's affine, activation and dropout as one pass, and its backward, as kernels/chain.h says. torch in, torch out.
//
// x and g are float32, bfloat16 or float16 (in and out, float32 in between), rows × channels, contiguous, on the CPU or on CUDA; γ and β
// are float32, one value a channel, both or none (undefined: y = x); `on` is uint8 with one bit a value; the seed is an int64[1] tensor on
// the device, needed only for dropout. `origin` is the number of x's first value in the tensor that it is a chunk of, a multiple of 8.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "satchel/tensor/packed.h"

namespace satchel {

struct ChainOptions {
  double dropout = 0;  // the chance to drop, in [0, 1), rounded to 2^16ths
  double slope = 0;    // of the off side: 0 for ReLU, else LeakyReLU; 1 for no activation
};

/// z = act(γ·x + β), dropped and scaled. A value is on where its bit of `on` says so, or where y > 0 if `on` is undefined.
at::Tensor apply_chain(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, const at::Tensor& on, const at::Tensor& seed,
                       const ChainOptions& options, int64_t origin = 0);

/// The gradient of y = γ·x + β from z's. Undefined `on`: all values were on.
at::Tensor chain_gradient(const at::Tensor& g, const at::Tensor& on, const at::Tensor& seed, const ChainOptions& options,
                          int64_t origin = 0);
/// The same, written over g.
void chain_gradient_(const at::Tensor& g, const at::Tensor& on, const at::Tensor& seed, const ChainOptions& options, int64_t origin = 0);

/// One bit a value, 1 where γ·x + β > 0: uint8, a byte for every 8 values begun.
at::Tensor on_bits(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta);
/// The same bits out of a side code of a contiguous tensor.
at::Tensor on_bits(const Packed& side_code);

}  // namespace satchel
