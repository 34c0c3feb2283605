// BatchNorm of maps, a residual sum and ReLU in one pass over the values for methods that keep each function's own: CUDA, where the fused
// kernels fit. What they keep is what pack() or pack_mixed() keep of the normalised values in float32 and on_bits() of what goes into the
// ReLU. Activations (x, skip, z, g) are float32, bfloat16 or float16, rows × channels of a map in channels_last order; everything else is
// float32. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/tensor/mixed.h"
#include "satchel/tensor/norm_act.h"
#include "satchel/tensor/packed.h"

namespace satchel {

/// Do the fused kernels serve the map x with this spec? `mixed`: samples have bits of their own.
bool fuses_norm_map(const at::Tensor& x, const CodecSpec& spec, bool mixed);

/// What goes in; activations as for_kernels() of tensor/norm_block.h gives them.
struct NormMapInput {
  at::Tensor map;  // x, whose sizes and strides the codes have
  at::Tensor x;    // its rows
  ColumnMoments moments;
  at::Tensor gamma, beta;
  at::Tensor skip = {};       // rows; undefined: nothing is added
  bool relu = true;           // with a skip always
  at::Tensor into = {};       // where z is written, x or skip themselves included; undefined: memory of its own
  bool takes_ranges = false;  // of z
};

/// The packed normalised values in the map's sizes, one of the two.
struct NormMapCodes {
  Packed fixed;
  MixedPacked mixed;
};
struct NormMapResult {
  NormMapCodes codes;
  at::Tensor on;        // ReLU's mask, a bit a value; undefined without ReLU
  at::Tensor z;         // rows
  at::Tensor z_ranges;  // least and most of each block of 256 values of z, float32[blocks, 2]; undefined where not asked for
};
NormMapResult norm_map_encode(const NormMapInput& in, const CodecSpec& spec, const at::Tensor& seed);
/// … in bits shared out by the samples' ranges, `mean_bits` in the mean.
NormMapResult norm_map_encode_mixed(const NormMapInput& in, const CodecSpec& spec, const at::Tensor& seed, double mean_bits);

/// Gradients of β and γ for g, that of z, as for_kernels() gives it. Undefined `on`: no ReLU.
NormActSums norm_map_sums(const at::Tensor& g, const NormMapCodes& codes, const at::Tensor& on);

/// One pass: g becomes the gradient of skip, dx that of x. `dx` has g's shape and type, contiguous from a multiple of 16 bytes on;
/// undefined: only g is written; g itself: only x's gradient is, over g. `squares`: where not null, becomes the squared norm of each
/// sample's dx, float32[samples].
void norm_map_back_(const at::Tensor& g, const at::Tensor& dx, const NormMapCodes& codes, const at::Tensor& on, const at::Tensor& gamma,
                    const at::Tensor& rstd, const NormActSums& sums, at::Tensor* squares = nullptr);

}  // namespace satchel
