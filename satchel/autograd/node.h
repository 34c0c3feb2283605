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

#include "satchel/autograd/saving.h"
#include "satchel/core/saved.h"

namespace satchel {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

class SavingNode : public torch::autograd::Node {
 public:
  SavingNode(const char* op, std::string layer) : op_(op), layer_(std::move(layer)), clock_(step_clock()) {}

  /// What it keeps now, a line each; nothing once backward has released it. What still waits for its reader is packed first, unless that
  /// reader has come.
  std::vector<SavedTensor> saved();
  /// Packs what still waits for its reader. The caller holds one pointer to the node.
  void settle();
  /// A reader has taken over: may the node wait on, since nobody else has read its output so far? The caller holds one pointer to the node.
  virtual bool may_wait_on() const { return false; }
  std::string name() const override { return std::string("Satchel<") + op_ + ">"; }

 protected:
  virtual std::vector<SavedTensor> lines() const = 0;
  /// Gradients of the inputs, in their order. Runs without recording.
  virtual variable_list back(at::Tensor gradient) = 0;
  /// Lets go of everything that was kept.
  virtual void release() = 0;
  /// Packs what waits, if anything does. The caller holds one pointer to the node.
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

/// A norm whose output has been read by nobody yet keeps its input, not packed: a ReLU that comes next has a use for it. One norm a thread
/// waits, the newest; whatever function of this library is recorded next settles it.
void wait_for_reader(const std::shared_ptr<SavingNode>& norm);
/// The one that waits in this thread; else null.
std::shared_ptr<SavingNode> waiting_norm();
/// Its reader has come and keeps what is needed: if y itself is read once more, the norm packs after all.
void reader_has_come();
void settle_waiting_norm();

/// Does any of them need a gradient, and are gradients being recorded?
template <class... Tensors>
bool records(const Tensors&... inputs) {
  return torch::autograd::compute_requires_grad(inputs...);
}

/// A node with edges to the inputs' own, in their order. Settles the norm that waits.
template <class NodeType, class... Tensors>
std::shared_ptr<NodeType> make_node(const std::string& layer, const Tensors&... inputs) {
  settle_waiting_norm();
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

/// Σ over rows of rows × columns in float32, the gradient of a bias. On CUDA as a product: torch's reduction over the outer dimension was
/// 0.3 of 5 ms of a step (docs/results.md).
at::Tensor column_sums(const at::Tensor& g);

/// The gradient to work in: g itself where nobody else holds it, else a copy; contiguous.
at::Tensor own(at::Tensor&& g);

}  // namespace satchel
