// Norms by row (LayerNorm, RMSNorm) and smooth activations, each alone or one after the other: x̂ = (x − mean)·rstd, y = γ·x̂ + β, z =
// act(y). Kept are x̂ and the activation's slope act'(y), each in a block code of its own, and rstd.
//
//   row_norm    statistics and y, one read of x
//   row_encode  codes, and z where there is an activation, one read of x
//   row_back    all gradients, one read of g
//
// Activations (x, y, z, g) are rows × width of f32, bf16 or f16 from a multiple of 16 bytes on; all else is float32. Codes and headers
// start at multiples of 16. Where CMake found no CUDA, none.cpp stands in: nothing fits, and the rest throws.
#pragma once

#include <cstdint>

#include "satchel/core/layer.h"
#include "satchel/kernels/cuda/epilogue.h"

namespace satchel::cuda {

struct RowShape {
  int64_t rows = 0, width = 0;
};

/// A number a row, or a channel.
struct RowNorm {
  float *mean = nullptr, *rstd = nullptr;
  const float *gamma = nullptr, *beta = nullptr;
  double eps = 1e-5;
  bool centred = true;  // false: RMSNorm; the mean is written as 0, and not read
};

/// One of the two codes; codes null: it is not kept.
struct RowCode {
  BlockCode code = {};
  CodeParts at = {};
  const uint64_t* seed = nullptr;  // row_encode
};

struct RowGradients {
  const void* g;
  DType type;  // of g and x
  void* x;     // may be g; null: not wanted
  float *gamma, *beta;
  bool corrects = false;  // for what the code's variance takes from the gradient (docs/theory.md 8); reads the norm's eps
};

/// Rows of 8 to 8,192 values in multiples of 8, less than 2^32 groups of 8.
bool row_norm_fits(const RowShape&);
/// Straight blocks of 256 values with bf16 headers: x̂ in 1 to 3 bits, those of 3 uneven, and slopes in 3 or 4 bits of even levels. Codes
/// that are not kept fit.
bool row_norm_code_fits(const BlockCode&);
bool slope_code_fits(const BlockCode&);

void row_norm(const RowShape&, const RowNorm&, const void* x, DType, void* y, StreamHandle);

/// The bytes of encode() of x̂ and of the slopes at y as it stands in memory, without gaps. Without a norm's code y is x.
/// `z` is written where slopes are kept; it is not x.
void row_encode(const RowShape&, const RowNorm&, const RowCode& norm, const RowCode& slope, Smooth, const void* x, DType, void* z,
                StreamHandle);

/// Of a norm with or without an activation after it.
int64_t row_back_scratch_bytes(const RowShape&);
void row_back(const RowShape&, const RowNorm&, const RowCode& norm, const RowCode& slope, const RowGradients&, void* scratch, StreamHandle);
/// … of an activation alone: out = g · slope; out may be g.
void slope_back(const RowShape&, const RowCode& slope, const void* g, DType, void* out, StreamHandle);

/// z and slopes of any number of values at y, to the bit those of row_encode().
void smooth(Smooth, const void* y, DType, int64_t values, void* z, float* slope, StreamHandle);

}  // namespace satchel::cuda
