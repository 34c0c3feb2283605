// BatchNorm → ReLU → dropout in one pass over the values for methods that keep each function's own: CUDA, where the fused kernels fit.
// What they keep is what pack() and pack_mask() keep of the same values. Activations (x, z, g) are float32, bfloat16 or float16, everything
// else float32. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/tensor/norm_act.h"
#include "satchel/tensor/packed.h"

namespace satchel {

/// Do the fused kernels serve x (rows × channels) with this spec?
bool fuses_norm_block(const at::Tensor& x, const CodecSpec& spec);

/// x itself, or a copy, where the kernels can read it: contiguous, from a multiple of 16 bytes on.
at::Tensor for_kernels(const at::Tensor& x);

/// What backward reads, next to γ.
struct NormBlockSave {
  Packed code;            // of the norm's input
  ColumnMoments moments;  // its mean and deviation
  at::Tensor on;          // ReLU's mask, a bit a value
  at::Tensor kept;        // dropout's; undefined: none, or redrawn from the seed
  at::Tensor seed;        // of the dropout; may be undefined where `kept` is not
  double dropout = 0;
};

struct NormBlockSeeds {
  at::Tensor code, dropout;  // dropout: undefined where p is 0
};
struct NormBlockResult {
  NormBlockSave save;
  at::Tensor z;
};
/// x as for_kernels() gives it. `keeps_mask`: dropout's mask is kept instead of its seed. `into`: where z is written, of x's shape and
/// type, x itself included; undefined: memory of its own.
NormBlockResult norm_block_encode(const at::Tensor& x, const ColumnMoments& moments, const at::Tensor& gamma, const at::Tensor& beta,
                                  const CodecSpec& spec, const NormBlockSeeds& seeds, double dropout, bool keeps_mask,
                                  const at::Tensor& into = {});

/// Gradients of β and γ for g, that of z, as for_kernels() gives it.
NormActSums norm_block_sums(const at::Tensor& g, const NormBlockSave& save);
/// g becomes the gradient of x, in place.
void norm_block_back_(const at::Tensor& g, const NormBlockSave& save, const at::Tensor& gamma, const NormActSums& sums);

}  // namespace satchel
