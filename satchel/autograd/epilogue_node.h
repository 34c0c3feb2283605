// The node of an epilogue, and how a norm defers its packing. Private to this room.
#pragma once

#include "satchel/autograd/epilogue_kernel.h"
#include "satchel/autograd/node.h"

namespace satchel {

/// Inputs: x, γ, β, and the skip or the norm that the epilogue has claimed.
class EpilogueNode : public SharingNode {
 public:
  explicit EpilogueNode(const std::string& layer) : SharingNode("epilogue", layer) {}

  EpilogueSaves saves;
  const EpilogueKernel* kernel = nullptr;
  bool claims = false;  // its last input is a norm that it has claimed

  std::vector<SavedTensor> lines() const override;
  std::shared_ptr<const SharedSave> shared() override;
  bool may_stay_deferred() const override { return being_claimed || (claimer_save != nullptr && output_lives() && !is_read_by_others()); }

  /// Nothing is packed until somebody asks, and what is may stand for `out` as well.
  void defer(EpilogueCall call, const at::Tensor& out);
  /// Its output is about to go, edge and all. Where only the claimer reads the norm then, nobody needs the input any more.
  void output_goes();
  /// What it was called with, and the seed: if it packs after all, it draws another.
  std::optional<EpilogueCall> claim();
  /// Whoever asked has its node, or has failed.
  void claim_ends();
  /// From here on `save` serves for the gradient that the claimer hands on: nothing else needs values of the norm.
  void claimed_by(const std::shared_ptr<SharingNode>& node, std::shared_ptr<const SharedSave> save);

 protected:
  variable_list back(at::Tensor g) override;
  void release() override;
  void pack_now() override;

 private:
  /// What the gradient of a norm reads that deferred, and that has not packed: the claimer's values, or x itself.
  NormBack unpacked_norm() const;
  std::shared_ptr<const SharedSave> made_shared() const;
  /// Does the output stand, and is it still this node's?
  bool output_lives() const;
  /// Do edges lead here beside the claimer's? The caller holds one pointer to this node.
  bool is_read_by_others() const { return weak_from_this().use_count() > 1 + (output_lives() ? 1 : 0) + (claimer.expired() ? 0 : 1); }

  // Of a norm that has deferred its packing.
  std::optional<EpilogueCall> deferred;  // not packed yet
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> output;
  c10::VariableVersion output_changes;
  bool lost = false;                                    // x was changed in place before it was packed
  bool being_claimed = false;                           // an activation has asked for the call, and makes its node
  std::weak_ptr<SharingNode> claimer;                   // an activation that keeps what both need
  std::shared_ptr<const SharedSave> claimer_save = {};  // … which is this
  at::Tensor gamma, beta;                               // what a reader of the output rebuilds it with; undefined: 1 and 0
  uint32_t x_version = 0, gamma_version = 0, beta_version = 0;
  bool shares = false, has_bits = false;  // a reader may rebuild the output; … which needs as many bits as weights do
};

}  // namespace satchel
