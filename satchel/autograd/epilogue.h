// What follows a layer's product, norm → (+ skip) → activation → dropout, as one function and one node: whichever of them there are.
// Private to the rooms that define functions.
//
//   public function           norm  skip  activation       dropout
//   batch_norm, layer_norm …   ×
//   norm_act                   ×           ×                ×
//   norm_add_act               ×     ×     ×
//   relu, leaky_relu, elu                  ×
//   gelu, silu, sigmoid, tanh  ×           ×                         after a norm by row; else they are functions of their own (smooth.h)
//
// What is kept is core/keep.h's answer. Who computes is a list of kernels, best first (epilogue_node.h). A norm that is called alone in
// methods whose layers share defers its packing: an activation that comes next claims it, and both keep one thing (docs/theory.md 10).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/statistics.h"
#include "satchel/core/keep.h"

namespace satchel {

class EpilogueNode;

/// What is computed, of which sizes: a call without its tensors.
struct EpilogueForm {
  NormAxes axes = {};
  NormOptions options = {};
  int64_t width = 0;                // values a row: channels, or those of LayerNorm's shape
  std::vector<int64_t> sizes = {};  // of x
  Activation activation = Activation::none;
  Smooth smooth = Smooth::none;  // instead of an activation: one whose derivative is kept
  double slope = 1;              // of the activation's off side: ReLU 0, none 1
  double alpha = 1;              // ELU's
  double dropout = 0;            // none unless training

  bool is_image() const { return axes.span > 0; }
  bool has_norm() const { return axes.norm != Norm::none; }
  /// x's values as rows of `width`, in the order in which they are packed: a view or a copy, without a history.
  at::Tensor as_rows(const at::Tensor& x) const;
  /// … and rows in x's sizes again, with its image's order: the same memory, no view to autograd.
  at::Tensor in_sizes(const at::Tensor& rows) const;
  /// The output's gradient as rows to work in.
  at::Tensor gradient_rows(at::Tensor&& g) const;
};

struct EpilogueCall : EpilogueForm {
  at::Tensor x;
  NormWeights weights;  // γ and β as lines
  SavePolicy saving;
  at::Tensor skip;                                // x's sizes, added before the activation
  std::shared_ptr<SharedGradient> skip_gradient;  // where its gradients meet; null: autograd adds them up
  at::Tensor normed;                              // the norm's output, which a smooth activation reads
  std::string smooth_name;                        // … and the activation's name in reports
  bool next_reads = true;                         // as Site has it
  at::Tensor spare;                               // x's own memory, where the output may be written over it

  std::function<at::Tensor(int64_t first, int64_t last)> samples = {};  // of an x that has no memory and comes in parts of the batch

  Statistics known;                       // undefined: not taken yet
  at::Tensor seed;                        // of the norm's code; undefined: not drawn yet
  std::shared_ptr<EpilogueNode> claimed;  // the deferred norm that the call was made with

  EpilogueCall(const at::Tensor& x, const NormWeights& weights, const NormAxes& axes, const NormOptions& options, const SavePolicy& saving,
               int64_t width);
  /// Values that share a mean and a deviation; 0 where the gradient of x does not read what the norm keeps.
  int64_t count() const;
  Site site() const;
};

/// x is checked. `groups`: GroupNorm's, else 0.
EpilogueCall norm_call(const at::Tensor& x, const NormWeights& weights, Norm norm, int64_t groups, const NormOptions& options,
                       const SavePolicy& saving);
/// No norm, for functions of single values: an image is rows of its channels, anything else rows of its last dimension. Images have 4 or 5
/// dimensions, or 3 in channels_last order: other 3 may as well be sequences.
EpilogueCall value_call(const at::Tensor& x, const SavePolicy& saving);

/// The call as one node. All is checked, gradients are recorded, and the method is none of torch's own functions.
at::Tensor epilogue(EpilogueCall call);
/// A norm alone, which defers its packing until its reader shows where layers share.
at::Tensor norm_alone(EpilogueCall call);
/// The call of the norm that defers in this thread, where y is its untouched output, for an activation that keeps what both need; the norm
/// packs nothing unless another reads y too. `wanted`: tells which norms, if not all.
std::optional<EpilogueCall> claim_norm(const at::Tensor& y, const std::function<bool(const EpilogueCall&)>& wanted = {});

}  // namespace satchel
