// BatchNorm of maps, a residual sum and ReLU in one pass over the values for methods that keep each function's own: CUDA, where the fused
// kernels fit. What they keep is what pack() or pack_per_sample() keep of the normalised values in float32 and on_bits() of what goes into
// the ReLU. Activations (x, skip, z, g) are float32, bfloat16 or float16, rows × channels of a map in channels_last order; everything else
// is float32. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/tensor/norm_act.h"
#include "satchel/tensor/packed.h"
#include "satchel/tensor/per_sample.h"

namespace satchel {

/// Do the fused kernels serve the map x with this spec? `mixed`: samples have bits of their own.
bool fuses_norm_image(const at::Tensor& x, const CodecSpec& spec, bool per_sample);

/// What goes in; activations as for_kernels() of tensor/norm_block.h gives them.
struct NormImageInput {
  at::Tensor map;  // x, whose sizes and strides the codes have
  at::Tensor x;    // its rows
  ColumnMoments moments;
  at::Tensor gamma, beta;
  at::Tensor skip = {};       // rows; undefined: nothing is added
  bool relu = true;           // with a skip always
  at::Tensor into = {};       // where z is written, x or skip themselves included; undefined: memory of its own
  bool takes_ranges = false;  // of z
};

struct NormImageResult {
  Packed code;          // the normalised values in the image's sizes
  at::Tensor on;        // ReLU's mask, a bit a value; undefined without ReLU
  at::Tensor z;         // rows
  at::Tensor z_ranges;  // least and most of each block of 256 values of z, float32[blocks, 2]; undefined where not asked for
};
NormImageResult norm_image_encode(const NormImageInput& in, const CodecSpec& spec, const at::Tensor& seed);
/// … in bits shared out by the samples' ranges, `mean_bits` in the mean.
NormImageResult norm_image_encode_per_sample(const NormImageInput& in, const CodecSpec& spec, const at::Tensor& seed, double mean_bits);

/// Gradients of β and γ for g, that of z, as for_kernels() gives it. Undefined `on`: no ReLU.
NormActSums norm_image_sums(const at::Tensor& g, const Packed& code, const at::Tensor& on);

/// One pass: g becomes the gradient of skip, dx that of x. `dx` has g's shape and type, contiguous from a multiple of 16 bytes on;
/// undefined: only g is written; g itself: only x's gradient is, over g. `squares`: where not null, becomes the squared norm of each
/// sample's dx, float32[samples].
void norm_image_back_(const at::Tensor& g, const at::Tensor& dx, const Packed& code, const at::Tensor& on, const at::Tensor& gamma,
                      const at::Tensor& rstd, const NormActSums& sums, at::Tensor* squares = nullptr);

}  // namespace satchel
