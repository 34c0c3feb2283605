// One norm, from its input to its node: what a norm is called with, what it keeps, and how a reader that comes next takes over. Private to
// this room.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "satchel/autograd/norm.h"
#include "satchel/autograd/statistics.h"
#include "satchel/core/layer.h"

namespace satchel {

/// A norm and all that it works on.
struct NormCall {
  at::Tensor x;
  NormWeights weights;  // γ and β as lines
  NormAxes axes;
  NormOptions options;
  Saving saving;
  int64_t width = 0;      // values a row: channels, or those of LayerNorm's shape
  Statistics known = {};  // undefined: not taken yet
  at::Tensor seed = {};   // of the code; undefined: not drawn yet
  bool by_map() const { return axes.span > 0; }
};

/// x is checked. `groups`: GroupNorm's, else 0.
NormCall norm_call(const at::Tensor& x, const NormWeights& weights, Norm norm, int64_t groups, const NormOptions& options,
                   const Saving& saving);

/// No norm, for functions of single values: a map is rows of its channels, anything else rows of its last dimension. Maps have 4 or 5
/// dimensions, or 3 in channels_last order: other 3 may as well be sequences.
NormCall plain_call(const at::Tensor& x, const Saving& saving);

/// x's values as rows of `width`, in the order in which they are packed: a view or a copy, without a history.
at::Tensor rows_of(const NormCall& call);
/// … and rows in x's sizes again, with its map's order: the same memory, no view to autograd.
at::Tensor in_sizes(const at::Tensor& rows, at::IntArrayRef sizes, const NormAxes& axes);
/// The output's gradient as rows to work in.
at::Tensor gradient_rows(at::Tensor&& g, const NormAxes& axes, int64_t width);

/// The norm as a node of its own; all is checked, and gradients are recorded. `waits`: in shared methods it packs when its reader shows.
at::Tensor recorded_norm(NormCall call, bool waits);

/// Layer by layer with ReLU (slope 0) or LeakyReLU in the same pass: the lines of norm and mask. Statistics by channel only.
at::Tensor recorded_norm_act(NormCall call, double slope);

/// What the norm that waits in this thread was called with, where y is its untouched output: the caller keeps what both need, and the
/// norm packs nothing.
std::optional<NormCall> take_norm(const at::Tensor& y);

}  // namespace satchel
