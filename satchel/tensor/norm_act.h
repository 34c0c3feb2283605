// Norm → activation → dropout in one pass over the values, with the side code as all that backward reads: CUDA, where the fused
// kernels fit. What they keep is what pack_side() keeps of the same normalised values in fp32. Activations (x, z, g) are float32,
// bfloat16 or float16, everything else float32. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "satchel/tensor/chain.h"
#include "satchel/tensor/extra_bit.h"
#include "satchel/tensor/packed.h"

namespace satchel {

/// Do the fused kernels serve x (rows × channels) with this spec?
bool fuses_norm_act(const at::Tensor& x, const CodecSpec& spec);
/// … and a packed one?
bool fuses_norm_act(const Packed& code);

struct ColumnMoments {
  at::Tensor mean, rstd;  // one number a channel
};
/// Of every channel over rows, which also updates the running ones where they are defined.
ColumnMoments column_moments(const at::Tensor& x, const at::Tensor& running_mean, const at::Tensor& running_var, double eps,
                             double momentum);

struct NormActResult {
  Packed code;
  at::Tensor z;  // the next layer's input
};
/// `into`: where z is written, contiguous and of x's shape and type, x itself included; undefined: memory of its own. `extra`: samples of 3
/// bits among those of 2, here and below the same.
NormActResult norm_act_encode(const at::Tensor& x, const ColumnMoments& moments, const at::Tensor& gamma, const at::Tensor& beta,
                              const CodecSpec& spec, const at::Tensor& seed, const ChainOptions& options, const at::Tensor& into = {},
                              const ExtraBit& extra = {});

/// Gradients of β and γ for g, that of z.
struct NormActSums {
  at::Tensor beta, gamma;
};
NormActSums norm_act_sums(const at::Tensor& g, const Packed& code, const at::Tensor& seed, const ChainOptions& options,
                          const ExtraBit& extra = {});
/// g becomes the gradient of x, in place; `training`: the statistics were the batch's.
void norm_act_back_(const at::Tensor& g, const Packed& code, const at::Tensor& seed, const ChainOptions& options, const at::Tensor& rstd,
                    const NormActSums& sums, bool training, const ExtraBit& extra = {});
/// g = scale·g + along·x + offset in place, a number of each a channel: g and x rows × channels of one type, contiguous, on CUDA.
void norm_rows_back_(const at::Tensor& g, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& along, const at::Tensor& offset);

/// Rows [first, last) of z again, float32, bfloat16 or float16.
at::Tensor norm_act_input(const Packed& code, const at::Tensor& seed, const ChainOptions& options, int64_t first, int64_t last,
                          at::ScalarType type = at::kFloat, const ExtraBit& extra = {});

}  // namespace satchel
