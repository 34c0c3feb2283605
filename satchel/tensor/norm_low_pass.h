// BatchNorm [+ residual sum] [→ ReLU] of channels_last planes for methods that keep the norm's input as a low-pass (DIVISION): CUDA, where
// the fused kernels fit. What they keep is what pack() and pack_mask() keep of the same values. Activations (x, skip, z, g) are float32,
// bfloat16 or float16, N×C×H×W in channels_last order from a multiple of 16 bytes on, everything else float32. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/tensor/norm_act.h"
#include "satchel/tensor/packed.h"

namespace satchel {

/// Do the fused kernels serve x with this spec?
bool fuses_norm_low_pass(const at::Tensor& x, const CodecSpec& spec);

/// What backward reads, next to γ.
struct NormLowPassSave {
  Packed code;            // of the norm's input
  ColumnMoments moments;  // its mean and deviation
  at::Tensor on;          // ReLU's mask, a bit a value of samples × pixels × channels; undefined: no ReLU
};

/// The norm, and what is done with its output.
struct NormLowPassCall {
  at::Tensor gamma, beta, running_mean, running_var;  // one number a channel; the running ones may be undefined
  double eps = 1e-5, momentum = 0.1;
  bool relu = true;
  at::Tensor skip;  // undefined: no sum; only with ReLU
};

struct NormLowPassResult {
  NormLowPassSave save;
  at::Tensor z;
};
/// Two reads of x. `into`: where z is written, of x's sizes, strides and type, x or skip themselves included; undefined: memory of its own.
NormLowPassResult norm_low_pass_encode(const at::Tensor& x, const NormLowPassCall& call, const CodecSpec& spec, const at::Tensor& seed,
                                       const at::Tensor& into = {});

/// Gradients of β and γ for g, that of z.
NormActSums norm_low_pass_sums(const at::Tensor& g, const NormLowPassSave& save);

/// One pass: g becomes the gradient of skip, dx that of x. `dx` has g's sizes, strides and type; undefined: only g is written; g itself:
/// only x's gradient is, over g.
void norm_low_pass_back_(const at::Tensor& g, const at::Tensor& dx, const NormLowPassSave& save, const at::Tensor& gamma,
                         const NormActSums& sums);

}  // namespace satchel
