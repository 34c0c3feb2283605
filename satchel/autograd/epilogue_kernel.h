// Who computes an epilogue: a list, best first. The last one is unfused and serves everything; the others give the same bytes and the same
// numbers within rounding. SATCHEL_EPILOGUE=name leaves that one and the unfused one. Private to this room.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "satchel/autograd/epilogue.h"
#include "satchel/autograd/shared.h"
#include "satchel/tensor/packed.h"

namespace satchel {

/// What backward reads, in the order of the forward pass.
struct EpilogueSaves {
  NormAxes axes;
  bool has_norm = false, training = true, adds_skip = false;
  int64_t width = 0;
  std::vector<int64_t> sizes;  // of x
  std::optional<double> eps;   // of NormBack, where layers share

  bool reads_values = true;  // the norm's gradient reads its values: not with running statistics and a frozen γ
  Saved norm;                // x̂, or x itself where `mean` is kept
  at::Tensor mean, rstd;     // as statistics_of() gives them, or lines of one number a channel: the kernel that wrote them reads them
  std::optional<torch::autograd::SavedVariable> gamma;  // changing it in place before backward is an error, as in torch

  std::shared_ptr<SharedSave> code;  // for the activation and the next layer: x̂, or the activation's result
  bool code_is_normalised = false;   // … x̂: it serves the norm as well
  bool serves_next = false;          // else for the activation alone
  at::Tensor on;                     // a bit a value, where there is no code
  Activation activation = Activation::none;
  double slope = 1, alpha = 1;

  double dropout = 0;
  at::Tensor dropout_seed, dropout_mask;  // one of them, where there is no code that has the seed

  bool tells_squares = false;  // the layer before allocates bits by the squares of x's gradient
  at::Tensor z_ranges;         // of the result, for the layer that packs it: passed on, not kept

  at::Tensor gamma_values() const { return gamma ? gamma->unpack().detach() : at::Tensor(); }
};

/// Which gradients are asked for; those of γ and β come with the norm's sums, β's alone where nothing else is summed.
struct EpilogueWants {
  bool x = true, skip = false, beta = true;
};
/// Rows of x and of skip, undefined where nobody asked.
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
};

/// The last of the list.
extern const EpilogueKernel kUnfusedEpilogue;
/// norm_act, norm_add, norm_block, norm_low_pass, norm_image, unfused.
std::span<const EpilogueKernel> epilogue_kernels();
const EpilogueKernel& epilogue_kernel(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows);

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

}  // namespace satchel
