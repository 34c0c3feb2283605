// Norms by row (LayerNorm, RMSNorm) and smooth activations, each alone or one after the other, in one pass over the values: CUDA, where the
// kernels of kernels/cuda/row_norm.h fit. What is kept is what pack() keeps of x̂ and of the activation's slope act'(y), y as it stands in
// memory. Activations (x, y, z, g) are float32, bfloat16 or float16; statistics, γ and β are float32. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/core/layer.h"
#include "satchel/tensor/epilogue.h"
#include "satchel/tensor/packed.h"

namespace satchel {

/// γ and β: a number a channel, from a multiple of 16 bytes on. mean and rstd: a number a row, of any shape; undefined where they are not
/// known yet.
struct RowNormInput {
  at::Tensor x;  // rows × width, as for_kernels() gives them
  at::Tensor gamma, beta;
  double eps = 1e-5;
  bool centred = true;  // false: RMSNorm
  at::Tensor mean = {}, rstd = {};
};

/// Do the kernels serve a norm of these rows, with x̂ in this code? With an activation whose slopes are in that one?
bool fuses_row_norm(const at::Tensor& rows, const CodecSpec& norm);
bool fuses_row_norm(const at::Tensor& rows, const CodecSpec& norm, const CodecSpec& slope);
/// … an activation alone, of any shape without gaps.
bool fuses_smooth(const at::Tensor& x, const CodecSpec& slope);

/// γ·x̂ + β in x's type; mean and rstd come into `in`, rows × 1 × 1 × 1.
at::Tensor row_norm(RowNormInput& in);
/// x̂ alone.
Packed row_norm_encode(const RowNormInput& in, const CodeChoice& norm);

struct SmoothResult {
  at::Tensor z;  // in x's type
  Packed slope;
  Packed norm = {};  // where there is one
};
/// act(γ·x̂ + β), and both codes.
SmoothResult row_norm_encode(const RowNormInput& in, const CodeChoice& norm, Smooth act, const CodeChoice& slope);
/// act(x), x as fuses_smooth() takes it.
SmoothResult smooth_encode(const at::Tensor& x, Smooth act, const CodeChoice& slope);

/// `g` becomes the gradient of x, rows as for_kernels() gives them; without `needs_x` only the sums are taken. `slope` null: no activation.
/// `corrects`: for what the code's variance takes from the gradient (docs/theory.md 8). Of `in` x, the mean and β are not read.
NormActSums row_norm_back_(const at::Tensor& g, const RowNormInput& in, const Packed& norm, const Packed* slope, bool corrects,
                           bool needs_x);
/// g · slope, as a tensor of g's type.
at::Tensor slope_gradient(const at::Tensor& g, const Packed& slope);

/// act(y) in y's type and act'(y), on any device: torch's own functions and y's type on the CPU, float32 slopes on CUDA.
struct SmoothValues {
  at::Tensor z, slope;
};
SmoothValues smooth_values(const at::Tensor& y, Smooth act);
/// torch's function alone.
at::Tensor smooth_function(const at::Tensor& y, Smooth act);

}  // namespace satchel
