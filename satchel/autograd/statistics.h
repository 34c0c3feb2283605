// Mean and deviation, and the gradient that flows back through them. Private to the rooms that define functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "satchel/autograd/norm.h"
#include "satchel/core/layer.h"

namespace satchel {

/// Of every channel (1 × channels) or of every row (rows × 1).
struct Statistics {
  at::Tensor mean, rstd;
};

/// Throws `[op] rule, got value` unless x is rows × channels of float32 or bfloat16 and the weights fit it.
void check_norm(const at::Tensor& x, const NormWeights& weights, Norm norm, const NormOptions& options, const char* op);

/// Of the batch (which updates the running ones) or the running ones; or of each row. float32, whatever x is.
Statistics statistics_of(const at::Tensor& x, const NormWeights& weights, Norm norm, const NormOptions& options);

/// (x − mean)·rstd, float32.
at::Tensor normalised(const at::Tensor& x, const Statistics& s);

/// What the gradient needs to know; `values` gives normalised rows first to last, to be written over.
struct NormBack {
  Norm norm;
  bool training;
  at::Tensor gamma, rstd;
  std::function<at::Tensor(int64_t first, int64_t last)> values;
};
struct NormGradients {
  at::Tensor gamma, beta;
};

/// g, the gradient of γ·x̂ + β, becomes that of x in place (unless only the weights' are asked for); those of the weights are float32.
/// `stretches` calls its argument for stretches of rows.
NormGradients norm_back_(const at::Tensor& g, const NormBack& back, bool needs_x,
                         const std::function<void(const std::function<void(int64_t, int64_t)>&)>& stretches);

}  // namespace satchel
