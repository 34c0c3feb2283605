// The node of an epilogue: what it keeps, who computes, and how a norm defers its packing. Kernels are a list, best first. The last one is
// unfused and serves everything; the others give the same bytes and the same numbers within rounding. SATCHEL_EPILOGUE=name leaves that one
// and the unfused one. Private to this room.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "satchel/autograd/epilogue.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/shared.h"
#include "satchel/tensor/packed.h"

namespace satchel {

/// What backward reads, in the order of the forward pass.
struct EpilogueSaves : EpilogueForm {
  bool adds_skip = false;
  std::optional<double> eps;  // of NormBack, where layers share

  bool reads_values = true;  // the norm's gradient reads its values: not with running statistics and a frozen γ
  Saved norm;                // x̂, or x itself where `mean` is kept
  at::Tensor mean, rstd;     // as statistics_of() gives them, or lines of one number a channel: the kernel that wrote them reads them
  std::optional<torch::autograd::SavedVariable> gamma;  // changing it in place before backward is an error, as in torch

  std::shared_ptr<SharedSave> code;       // for the activation and the next layer: x̂, or the activation's result
  bool code_is_normalised = false;        // … x̂: it serves the norm as well
  bool serves_next = false;               // else for the activation alone
  at::Tensor on;                          // a bit a value, where there is no code
  Packed derivative;                      // of a smooth activation, and
  std::string derivative_name;            // its name in reports
  at::Tensor dropout_seed, dropout_mask;  // one of them, where there is no code that has the seed

  bool tells_squares = false;  // the layer before allocates bits by the squares of x's gradient
  at::Tensor z_ranges;         // of the result, for the layer that packs it: passed on, not kept

  at::Tensor gamma_values() const { return gamma ? gamma->unpack().detach() : at::Tensor(); }
};

/// Which gradients are asked for; those of γ and β come with the norm's sums, β's alone where nothing else is summed.
struct EpilogueWants {
  bool x = true, skip = false, beta = true;
  SavingNode* x_parts = nullptr;  // who would take x's in parts of the batch; null: nobody
};
/// Rows of x and of skip, undefined where nobody asked. Where x's went in parts, a tensor of their sizes and of no memory stands for it.
struct EpilogueGradients {
  at::Tensor x, gamma, beta, skip;
  at::Tensor squares = {};  // of each sample of x's, where `tells_squares` asks
};

struct EpilogueKernel {
  const char* name;
  bool (*fits)(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows);
  /// The result's rows; what is kept goes to `saves`, whose description of the call stands.
  at::Tensor (*forward)(EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows, EpilogueSaves& saves);
  /// `g`: rows of the result's gradient, to be written over.
  EpilogueGradients (*back)(const EpilogueSaves& saves, const at::Tensor& g, const EpilogueWants& wants);
  /// Of kernels that serve a norm which defers its packing: statistics and output, and the norm's code later. Null: others do not.
  at::Tensor (*norm)(EpilogueCall& call, const at::Tensor& rows) = nullptr;
  void (*pack)(const EpilogueCall& call, const Keep& keep, const at::Tensor& rows, EpilogueSaves& saves) = nullptr;
};

/// The last of the list.
extern const EpilogueKernel kUnfusedEpilogue;
/// norm_act, norm_add, norm_alone, norm_block, norm_low_pass, norm_image, row_norm, unfused.
std::span<const EpilogueKernel> epilogue_kernels();
const EpilogueKernel& epilogue_kernel(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows);
/// Samples of an image of these sizes that go through norm_add at a time, where it goes in parts: a quarter, rounded up so that every part
/// starts at a multiple of 8 rows and of 1024 values.
int64_t part_samples(at::IntArrayRef sizes);
/// What the call keeps.
std::vector<Keep> keeps_of(const EpilogueCall& call);

/// The name of the kernel that made x; empty where x is no epilogue's result. For tests.
std::string epilogue_kernel_of(const at::Tensor& x);

/// g passes dropout and activation, in place.
void gate_gradient_(const EpilogueSaves& saves, const at::Tensor& g);
/// The norm of these saves, but for γ and where its values come from; or with γ and values of a code.
NormBack norm_of(const EpilogueSaves& saves);
NormBack norm_from_code(const EpilogueSaves& saves, std::shared_ptr<const SharedSave> save);
/// The unfused kernel's.
EpilogueGradients unfused_back(const EpilogueSaves& saves, const at::Tensor& g, const EpilogueWants& wants, const NormBack& norm);
/// γ·x̂ + β of rows, in their type: on CUDA's images in one pass.
at::Tensor norm_output(const EpilogueCall& call, const at::Tensor& rows);
/// Takes the statistics, unless they stand.
void take_statistics(EpilogueCall& call, const at::Tensor& rows);
/// Codes the normalised `values`, or `rows` themselves, as `keep` says.
void keep_norm(EpilogueSaves& saves, const EpilogueCall& call, const Keep& keep, const at::Tensor& rows, const at::Tensor& values);
/// The seed of the norm's code: the call's, or a fresh one.
at::Tensor norm_seed(const EpilogueCall& call);
/// Bits of the samples that are about to be coded as `keep` says, whose spec `spec` is: nothing unless they are allocated
/// (Keep::mean_bits). `splits`: the coder can give samples bits of their own.
ImageBits sample_bits(const EpilogueCall& call, const Keep& keep, CodecSpec& spec, bool splits);
/// γ and β of the call; 1 and 0 where it has none.
Affine affine_of(const EpilogueCall& call);

/// Inputs: x, γ, β, and the skip or the norm that the epilogue has claimed.
class EpilogueNode : public SharingNode {
 public:
  explicit EpilogueNode(const std::string& layer) : SharingNode("epilogue", layer) {}

  EpilogueSaves saves;
  const EpilogueKernel* kernel = nullptr;
  bool claims = false;  // its last input is a norm that it has claimed
  std::shared_ptr<SharedGradient> skip_gradient;

  std::vector<SavedTensor> lines() const override;
  std::shared_ptr<const SharedSave> shared() override;
  bool may_stay_deferred() const override { return being_claimed || (claimer_save != nullptr && output_lives() && !is_read_by_others()); }

  /// Nothing is packed until somebody asks, and what is may stand for `out` as well.
  void defer(EpilogueCall call, const at::Tensor& out);
  /// Its output is about to go, edge and all. Where only the claimer reads the norm then, nobody needs the input any more.
  void output_goes();
  /// What it was called with, and the seed, unless that is not wanted: if it packs after all, it draws another.
  std::optional<EpilogueCall> claim(const std::function<bool(const EpilogueCall&)>& wanted);
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
  std::optional<WeakTensor> output;
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
