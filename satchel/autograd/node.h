// The node of a function that keeps packed bytes. Saves are typed members that go when backward has read them.
// Private to the rooms that define functions.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "satchel/autograd/save_policy.h"
#include "satchel/core/saved.h"

namespace satchel {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

class SavingNode : public torch::autograd::Node {
 public:
  SavingNode(const char* op, std::string layer) : op_(op), layer_(std::move(layer)), clock_(step_clock()) {}

  /// What it keeps now, a line each; nothing once backward has released it. What is deferred is packed first, unless a
  /// reader has claimed it.
  std::vector<SavedTensor> saved();
  /// Packs what is deferred. The caller holds one pointer to the node.
  void pack_deferred();
  /// A reader has claimed it: may the node stay deferred, since nobody else has read its output so far? The caller holds one pointer to the
  /// node.
  virtual bool may_stay_deferred() const { return false; }
  std::string name() const override { return std::string("Satchel<") + op_ + ">"; }

  /// Can it take its output's gradient in parts of the batch, now, while the backward of the node that makes that gradient runs? Then
  /// take_part() gets them all, and its own backward, whose gradient has no memory, hands on what they gave.
  virtual bool begin_parts() { return false; }
  /// `g` is of the samples from `first` on, and is not read after the call.
  virtual void take_part(int64_t /*first*/, const at::Tensor& /*g*/) {}

 protected:
  virtual std::vector<SavedTensor> lines() const = 0;
  /// Gradients of the inputs, in their order. Runs without recording.
  virtual variable_list back(at::Tensor gradient) = 0;
  /// … where no gradient came: none.
  virtual variable_list back_of_nothing() { return variable_list(num_outputs()); }
  /// Lets go of everything that was kept.
  virtual void release() = 0;
  /// Packs what is deferred, if anything is. The caller holds one pointer to the node.
  virtual void pack_now() {}

  const char* op() const { return op_; }
  bool needs(size_t input) const { return task_should_compute_output(input); }
  /// Nobody will ask this node for gradients again: what it keeps may be overwritten.
  bool is_last_use() const { return last_use_; }
  const std::string& layer() const { return layer_; }

 private:
  variable_list apply(variable_list&& gradients) final;
  void will_release_variables() final { last_use_ = true; }
  void release_variables() final;

  const char* op_;
  std::string layer_;
  std::shared_ptr<StepClock> clock_;  // of the thread that recorded it
  bool last_use_ = false, released_ = false;
};

/// The functions below it choose their own types: autocast casts nothing while it lives.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

/// Defers a norm's packing: it keeps its input until its output is read, since a ReLU that reads it makes one save for both. At most one
/// norm per thread defers; the next function of this library makes it pack.
void defer(const std::shared_ptr<SavingNode>& norm);
/// This thread's deferred norm; else null.
std::shared_ptr<SavingNode> deferred_norm();
/// Its reader keeps what is needed: if y itself is read once more, the norm packs after all.
void claim_deferred();
void flush_deferred();

/// Does any of them need a gradient, and are gradients being recorded?
template <class... Tensors>
bool needs_grad(const Tensors&... inputs) {
  return torch::autograd::compute_requires_grad(inputs...);
}

/// A node with edges to the inputs' own, in their order. A deferred norm packs first.
template <class NodeType, class... Tensors>
std::shared_ptr<NodeType> make_node(const std::string& layer, const Tensors&... inputs) {
  flush_deferred();
  std::shared_ptr<NodeType> node(new NodeType(layer), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  return node;
}

/// `out`, a fresh tensor without a history, as the node's output: the tensor that comes back. A view of memory that nobody else has
/// becomes a tensor of its own, or autograd would refuse changes in place, and forget the node after some.
inline at::Tensor attach(at::Tensor out, const std::shared_ptr<torch::autograd::Node>& node) {
  if (out.is_view()) out = out.variable_data();
  torch::autograd::set_history(out, node);
  return out;
}

/// Throws where autocast is on for x's device: these functions choose their own types.
void check_no_autocast(const at::Tensor& x, const char* op);

/// The line of something that is kept as it is.
SavedTensor saved_line(const std::string& name, const char* kind, const at::Tensor& kept);

/// Σ over rows of rows × columns in float32, the gradient of a bias. On CUDA by our own kernel, or as a product where it does not serve:
/// torch's reduction over the outer dimension was 0.3 of 5 ms of a step (docs/results.md).
at::Tensor column_sums(const at::Tensor& g);

/// The gradient to work in: g itself where nobody else holds it, else a copy; contiguous.
at::Tensor take_or_clone(at::Tensor&& g);

}  // namespace satchel
