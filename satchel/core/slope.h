// Slopes of activations whose derivative rises between its least and its most: what backward needs of GELU, SiLU and Mish. A slope is
// rounded without bias between neighbours of a table of levels, and kept as its place there; backward gets a value with that slope.
#pragma once

#include <cmath>
#include <cstdint>

#include "satchel/core/noise.h"

namespace satchel {

enum class SlopeOf : uint8_t { gelu, gelu_tanh, silu, mish };
constexpr int kSlopes = 4;

/// Of x within [−30, 30], beyond which the slopes are 0 and 1 to the last bit.
template <SlopeOf kind>
SATCHEL_HD float slope(float x) {
  x = x < -30.0f ? -30.0f : x > 30.0f ? 30.0f : x;
  if constexpr (kind == SlopeOf::gelu) {
    return 0.5f * (1.0f + erff(x * 0.70710678f)) + x * expf(-0.5f * x * x) * 0.39894228f;
  } else if constexpr (kind == SlopeOf::gelu_tanh) {
    const float square = x * x, t = tanhf(0.79788456f * x * (1.0f + 0.044715f * square));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.79788456f * (1.0f + 0.134145f * square);
  } else {
    const float s = 1.0f / (1.0f + expf(-x));
    if constexpr (kind == SlopeOf::silu) return s * (1.0f + x * (1.0f - s));
    const float t = tanhf(log1pf(expf(x)));
    return t + x * s * (1.0f - t * t);
  }
}

/// The place of `value` among 2^bits rising levels, rounded by a noise of 16 bits; values outside take the ends.
SATCHEL_HD uint32_t level_code(float value, const float* levels, int bits, uint32_t noise) {
  uint32_t at = 0;
  for (int step = bits - 1; step >= 0; --step) {
    const uint32_t next = at + (1u << step);
    if (levels[next] <= value) at = next;
  }
  const uint32_t top = (1u << bits) - 1;
  if (at == top) return top;
  const float share = (value - levels[at]) / (levels[at + 1] - levels[at]);
  return at + ((static_cast<float>(noise) + 0.5f) * 0x1p-16f < share ? 1u : 0u);
}

}  // namespace satchel
