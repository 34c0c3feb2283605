// Norm → activation → dropout as one function with one save, which the next layer finds and shares (theory.md 10).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "satchel/autograd/conv.h"
#include "satchel/autograd/norm.h"
#include "satchel/autograd/save_policy.h"
#include "satchel/core/layer.h"

namespace satchel {

class SharedGradient;

struct NormActOptions {
  Norm norm = Norm::batch;
  Activation activation = Activation::relu;
  double slope = 0.01;  // LeakyReLU's
  double alpha = 1;     // ELU's
  double dropout = 0;   // none unless training
  NormOptions statistics;
  bool only_added = false;                             // without activation: nothing but a sum reads the result, so the norm keeps its own
  std::shared_ptr<SharedGradient> skip_gradient = {};  // norm_add_act: the skip is a block's input, whose gradients meet here
  bool training() const { return statistics.training; }
};

/// The next layer's input from rows × channels, or from maps N×C×spatial without LayerNorm, which come back in channels_last order; of
/// float32, bfloat16 or float16.
/// An x that was moved in and that nobody else holds may lend its memory to the result.
at::Tensor norm_act(at::Tensor x, const NormWeights& weights, const NormActOptions& options, const SavePolicy& saving = {});

/// The end of a residual block, with two saves: the norm's own normalised values and the sum's ReLU form, which the next layer shares.
/// act(norm(x) + skip), act being ReLU or none, of rows × channels or of images; skip has x's sizes and type. No dropout. An x that was
/// moved in and that nobody else holds may lend its memory to the result.
at::Tensor norm_add_act(at::Tensor x, const NormWeights& weights, const at::Tensor& skip, const NormActOptions& options,
                        const SavePolicy& saving = {});

/// norm_add_act(conv(x, weight), …), the end of a residual block. A large result of the convolution on CUDA is made by quarters of the
/// batch, once for the statistics and once to be coded, and never stands whole, where a skip that was moved in lends its memory to the sum.
/// x is N×C×spatial; no bias.
struct ConvOfSum {
  at::Tensor x, weight;
  ConvOptions options = {};
  SavePolicy saving = {};
};
at::Tensor conv_norm_add_act(ConvOfSum conv, const NormWeights& weights, at::Tensor skip, const NormActOptions& options,
                             const SavePolicy& saving = {});

}  // namespace satchel
