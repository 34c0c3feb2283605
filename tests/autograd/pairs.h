// Every norm with every activation, dropout and layout: as Satchel's functions and as torch's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "satchel/autograd/save_policy.h"
#include "satchel/core/saved.h"
#include "tests/autograd/gradient.h"

namespace satchel::test {

enum class PairNorm : uint8_t { batch, layer, group, rms };
enum class PairActivation : uint8_t { none, relu, leaky_relu, elu, gelu, gelu_tanh, silu, tanh, sigmoid };
/// rows: rows × channels. Images are N×C×H×W in either order of memory; LayerNorm and RMSNorm are then over C×H×W.
enum class PairLayout : uint8_t { rows, nchw, channels_last };

constexpr PairNorm kPairNorms[] = {PairNorm::batch, PairNorm::layer, PairNorm::group, PairNorm::rms};
constexpr PairActivation kPairActivations[] = {PairActivation::none, PairActivation::relu, PairActivation::leaky_relu,
                                               PairActivation::elu,  PairActivation::gelu, PairActivation::gelu_tanh,
                                               PairActivation::silu, PairActivation::tanh, PairActivation::sigmoid};

/// norm → activation → dropout.
struct Pair {
  PairNorm norm = PairNorm::batch;
  PairActivation activation = PairActivation::none;
  PairLayout layout = PairLayout::rows;
  double dropout = 0;
  bool fused = false;       // norm_act() instead of three functions, where it has the norm and the activation
  bool fixed_masks = true;  // dropout's are torch_pair()'s, else drawn as ever

  bool is_image() const { return layout != PairLayout::rows; }
  /// Statistics of whole samples of an image: its values are one row.
  bool is_flat() const { return is_image() && (norm == PairNorm::layer || norm == PairNorm::rms); }
};

constexpr int64_t kPairGroups = 4;
constexpr double kPairSlope = 0.2;

/// "layer_gelu_tanh_nchw_dropout", "fused_batch_relu_rows": letters and _, as googletest takes them.
std::string name_of(const Pair& pair);
/// All 4 · 9 · 3 · 2, and those that norm_act() has.
std::span<const Pair> all_pairs();

/// Sizes of γ and β for an x of these sizes: its channels, or C×H×W.
std::vector<int64_t> weight_sizes(const Pair& pair, at::IntArrayRef x);

/// The pair's functions; β is not read by RMSNorm. Dropout's mask is the same in both and in every pass, where masks are fixed.
at::Tensor our_pair(const Pair& pair, const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, const SavePolicy& saving);
at::Tensor torch_pair(const Pair& pair, const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta);

/// The pair and a layer that reads it, linear or a convolution: inputs x, γ, β and that layer's weight.
GradientCase pair_case(const Pair& pair);
/// The lines that keeps_of() promises of it, for x of these sizes.
std::vector<SavedTensor> planned_lines(const Pair& pair, at::IntArrayRef x, const Method& method);

}  // namespace satchel::test
