// The end of a residual block as one function with two saves: the norm's own normalised values and the sum's ReLU form, which the next
// layer finds and shares (docs/theory.md 10).
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/autograd/norm_act.h"

namespace satchel {

/// act(norm(x) + skip), act being ReLU or none, of rows × channels or of images; skip has x's sizes and type. No dropout. An x that was
/// moved in and that nobody else holds may lend its memory to the result.
at::Tensor norm_add_act(at::Tensor x, const NormWeights& weights, const at::Tensor& skip, const NormActOptions& options,
                        const Saving& saving = {});

}  // namespace satchel
