// Activation and dropout of normalised values, as plain values: z = kept · act(γ·x + β) · scale, element by element.
//
//   y = fmaf(γ, x, β)                                            x itself where γ and β are null
//   on = its bit of a mask, or y > 0 where there is no mask
//   kept = noise(seed, Stream::dropout, i) ≥ drop                no noise is drawn where drop is 0
//   factor = kept ? (on ? 1 : slope)·scale : 0
//   z = y·factor + 0                                             NaN and infinity stay visible, −0 becomes +0
//
// Backward multiplies the gradient by the same factor.
#pragma once

#include <cmath>
#include <cstdint>

#include "satchel/core/portable.h"

namespace satchel {

/// Value i of the tensor belongs to channel i % channels. Buffers and masks start at value number `origin`, a multiple of 8, so
/// that a tensor can be worked through in chunks.
struct Chain {
  int64_t values = 0;  // in the buffers
  int64_t channels = 1;
  float slope = 0.0f;  // of the off side: 0 for ReLU, else LeakyReLU; 1: no activation
  uint32_t drop = 0;   // less than 2^16: drop/2^16 is the chance
  float scale = 1.0f;  // of what is kept: 2^16/(2^16 − drop)
  int64_t origin = 0;
};

SATCHEL_HD float chain_input(float x, const float* gamma, const float* beta, int64_t channel) {
  return gamma == nullptr ? x : fmaf(gamma[channel], x, beta[channel]);
}

SATCHEL_HD float chain_factor(const Chain& c, bool on, bool kept) { return kept ? (on ? 1.0f : c.slope) * c.scale : 0.0f; }

SATCHEL_HD float chain_output(float y, float factor) { return y * factor + 0.0f; }

}  // namespace satchel
