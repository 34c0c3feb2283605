// Codes of the slopes of GELU, SiLU and Mish at x, and on the way back values with these slopes: what a backward formula that takes x needs
// (core/slope.h). Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "satchel/core/slope.h"

namespace satchel {

struct PackedSlope {
  at::Tensor bytes;   // one little-endian bit stream, in the order of memory
  at::Tensor values;  // float32[2^bits] on the same device: a value with the slope of each level
  std::vector<int64_t> shape, strides;
  at::ScalarType dtype = at::kFloat;
};

/// Slopes rounded without bias to 2^bits levels, 0 and 1 among them. x: float32, float16 or bfloat16; bits: 1 to 8; seed: int64[1] on x's
/// device.
PackedSlope pack_slope(const at::Tensor& x, SlopeOf kind, int bits, const at::Tensor& seed);
at::Tensor unpack_slope(const PackedSlope& packed);

/// 2^bits slopes that rise and a value with each, as `type` holds it: a level is the slope of that very value.
struct SlopeLevels {
  std::vector<float> levels, values;
};
SlopeLevels slope_levels(SlopeOf kind, int bits, at::ScalarType type);

}  // namespace satchel
