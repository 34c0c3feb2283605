// BatchNorm, residual sum and ReLU in one pass, z = relu(γ·x̂ + β + skip), with two codes as all that backward reads: CUDA, where the fused
// kernels fit. What they keep is what pack() keeps of x̂ in fp32 and of z as it stands in memory. Activations (x, skip, z, g) are float32,
// bfloat16 or float16, rows × channels, everything else float32. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/tensor/norm_act.h"
#include "satchel/tensor/packed.h"

namespace satchel {

/// Do the fused kernels serve x (rows × channels) with these specs? norm: a plain block code of 1 to 4 bits; sum: Side::relu; both in
/// blocks of 256.
bool fuses_norm_add(const at::Tensor& x, const CodecSpec& norm, const CodecSpec& sum);

/// What backward reads, next to γ and rstd.
struct NormAddCodes {
  Packed norm;          // of x̂
  Packed sum;           // of z: Side::relu, whose on bits are ReLU's mask
  ExtraBit extra = {};  // of the sum's samples of 3 bits
};

struct NormAddResult {
  Packed norm, sum;
  at::Tensor z;
};
/// x and skip as for_kernels() of tensor/norm_block.h gives them, of one shape and type. γ and β: float32, one value a channel. `into`:
/// where z is written, of x's shape and type, as for_kernels() gives it, x or skip themselves included; undefined: memory of its own.
/// `extra`: the sum's samples of 3 bits.
NormAddResult norm_add_encode(const at::Tensor& x, const ColumnMoments& moments, const at::Tensor& gamma, const at::Tensor& beta,
                              const at::Tensor& skip, const CodecSpec& norm, const CodecSpec& sum, const at::Tensor& seed_norm,
                              const at::Tensor& seed_sum, const at::Tensor& into = {}, const ExtraBit& extra = {});

/// Gradients of β and γ for g, that of z, as for_kernels() gives it.
NormActSums norm_add_sums(const at::Tensor& g, const NormAddCodes& codes);

/// One pass: g becomes the gradient of skip, dx that of x. `dx` has g's shape and type, contiguous from a multiple of 16 bytes on;
/// undefined: only g is written; g itself: only x's gradient is, over g. `training`: the statistics were the batch's.
void norm_add_back_(const at::Tensor& g, const at::Tensor& dx, const NormAddCodes& codes, const at::Tensor& gamma, const at::Tensor& rstd,
                    const NormActSums& sums, bool training);

}  // namespace satchel
