// Mean and deviation, and the gradient that flows back through them. Private to the rooms that define functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "satchel/autograd/norm.h"
#include "satchel/core/layer.h"

namespace satchel {

/// Whose mean and deviation: each channel's over rows, each row's over channels, or of `groups` groups of channels in each sample.
struct NormAxes {
  Norm norm = Norm::batch;  // not read where there are groups
  int64_t groups = 0;       // GroupNorm's
  int64_t span = 0;         // rows of a sample, where the rows are those of a map or there are groups
  bool centred = true;      // false: RMSNorm, whose mean is taken for 0
  bool by_channel() const { return groups == 0 && norm == Norm::batch; }
};

/// Of every channel (1 × channels), of every row (rows × 1 × 1 × 1), or of every group (samples × 1 × groups × 1).
struct Statistics {
  at::Tensor mean, rstd;
};

/// Throws `[op] rule, got value` unless x is rows × channels (BatchNorm: or a map) of a type that norms take, and the weights fit it.
void check_norm(const at::Tensor& x, const NormWeights& weights, Norm norm, const NormOptions& options, const char* op);
/// … unless w, where it is defined, is `count` numbers as a norm takes them.
void check_weight(const at::Tensor& x, const at::Tensor& w, int64_t count, const char* name, const char* op);
/// … unless x has as many channels as w, where that is defined, has numbers: x is what the caller gave last.
void check_channels(const at::Tensor& x, const at::Tensor& w, const char* name, const char* op);
/// … unless x has a type and a place that norms take.
void check_activations(const at::Tensor& x, const char* op);

/// Of the batch (which updates the running ones) or the running ones; or of each row or group. float32, whatever the rows x are.
Statistics statistics_of(const at::Tensor& x, const NormWeights& weights, const NormAxes& axes, const NormOptions& options);

/// (x − mean)·rstd, float32, of rows. `first`: x's first row is so many rows (whole samples, for groups) after the first of all.
at::Tensor normalised(const at::Tensor& x, const Statistics& s, const NormAxes& axes, int64_t first = 0);

/// γ·(x − mean)·rstd + β as γ'·x + β', one a channel (statistics by channel only).
struct Affine {
  at::Tensor gamma, beta;
};
Affine folded(const Statistics& s, const at::Tensor& gamma, const at::Tensor& beta);

/// What the gradient needs to know; `values` gives normalised rows first to last, or x's own where there is a mean, to be written over;
/// `type` is what they are wanted in, another does too.
struct NormBack {
  NormAxes axes;
  bool training;
  at::Tensor gamma, rstd;  // γ undefined: 1
  std::function<at::Tensor(int64_t first, int64_t last, at::ScalarType type)> values;
  at::Tensor mean = {};
  int64_t unit = 1;  // values are asked for in stretches that start at its multiples: rows of a sample, where those are wanted whole
  /// Rows' and groups' own statistics: of the forward pass, where the values are codes of about the same variance everywhere. The mean of
  /// exact x̂² is 1 − eps·rstd²; what the codes' is above that is their variance, which shortens the gradient by variance / N
  /// (docs/theory.md 8), and is made up for.
  std::optional<double> eps = {};
};
struct NormGradients {
  at::Tensor gamma, beta;
};

/// g, rows of the gradient of γ·x̂ + β, becomes that of x in place (unless only the weights' are asked for); those of the weights are
/// float32.
NormGradients norm_back_(const at::Tensor& g, const NormBack& back, bool needs_x);

}  // namespace satchel
