// One norm, from its input to its node: what a norm is called with, what it keeps, and how a reader that comes next takes over. Private to
// this room.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
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
  int64_t width = 0;                                       // values a row: channels, or those of LayerNorm's shape
  Statistics known = {};                                   // undefined: not taken yet
  at::Tensor seed = {};                                    // of the code; undefined: not drawn yet
  std::shared_ptr<torch::autograd::Node> taken_from = {};  // take_norm(): the norm itself
  bool by_map() const { return axes.span > 0; }
  /// Values that share a mean and a deviation; 0 where the gradient of x does not read what the norm keeps.
  int64_t count() const;
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
/// norm packs nothing unless another reads y too.
std::optional<NormCall> take_norm(const at::Tensor& y);

class SharingNode;
/// `taker`, whose edges lead to the norm's inputs and whose save stands, keeps what the norm needs: it gets one more edge, to the norm
/// that the call was taken from. For a call that was not, nothing happens.
void take_over(const NormCall& call, const std::shared_ptr<SharingNode>& taker);
/// Does anybody want the gradient of the norm's own output in the backward pass that runs now: grad(), a hook or retain_grad()? Then the
/// taker hands it to the norm alone; else it gives the norm's inputs theirs, and the norm nothing.
bool is_heard(torch::autograd::Node& norm);

}  // namespace satchel
