#include "satchel/autograd/norm_map.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

#include "satchel/autograd/adaptive.h"
#include "satchel/autograd/bit_shares.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/map_rows.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/norm_node.h"
#include "satchel/tensor/norm_block.h"
#include "satchel/tensor/norm_map.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

/// Keeps the normalised values and the activation's mask.
class NormMapNode : public SavingNode {
 public:
  explicit NormMapNode(const std::string& layer) : SavingNode("norm_map", layer) {}

  NormAxes axes;
  std::vector<int64_t> sizes;  // of x
  Packed packed;
  AdaptiveSave adaptive;  // in place of `packed`
  at::Tensor rstd, on;    // on: undefined without an activation
  double slope = 1;
  bool adds = false, fused = false;
  bool tells = false;                   // the layer before shares bits out by the squares of x's gradient
  std::optional<SavedVariable> weight;  // γ: changing it in place before backward is an error, as in torch

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    if (adaptive.defined()) {
      adaptive.report(layer(), "norm", kept);
    } else {
      report(packed, layer(), "norm", kept);
    }
    const auto bytes = static_cast<int64_t>(rstd.nbytes());
    kept.push_back({layer(), "statistics", {rstd.numel()}, 32, bytes, bytes});
    if (on.defined()) {
      int64_t count = 1;
      for (const int64_t size : sizes) count *= size;
      kept.push_back({layer(), "mask", sizes, 1, on.numel(), count});
    }
    return kept;
  }

 protected:
  /// In the order of the inputs: x, γ, β and, where there is one, skip.
  variable_list back(at::Tensor g) override {
    const at::Tensor gradient = gradient_rows(std::move(g), axes, sizes[1]);
    const at::Tensor gamma = weight ? weight->unpack().detach() : at::Tensor();
    return fused ? fused_back(for_kernels(gradient), gamma) : rows_back(gradient, gamma);
  }

  void release() override {
    packed = {};
    adaptive.release();
    for (at::Tensor* t : {&rstd, &on}) t->reset();
    weight.reset();
  }

 private:
  bool needs_skip() const { return adds && needs(3); }

  variable_list result(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, const at::Tensor& skip) const {
    const auto map = [&](const at::Tensor& rows) { return rows.defined() ? in_sizes(rows, sizes, axes) : rows; };
    variable_list gradients{map(x), gamma, beta};
    if (adds) gradients.push_back(map(skip));
    return gradients;
  }

  variable_list fused_back(const at::Tensor& g, const at::Tensor& gamma) const {
    NormMapCodes codes;
    if (adaptive.defined()) {
      codes.mixed = adaptive.packed();
    } else {
      codes.fixed = packed;
    }
    const NormActSums sums = norm_map_sums(g, codes, on);
    at::Tensor dx;
    if (needs(0)) dx = needs_skip() ? at::empty_like(g) : g;
    const bool passes_on = tells && needs(0);
    at::Tensor squares;
    if (needs(0) || needs_skip()) norm_map_back_(g, dx, codes, on, gamma, rstd, sums, passes_on ? &squares : nullptr);
    variable_list gradients = result(dx, sums.gamma, sums.beta, needs_skip() ? g : at::Tensor());
    if (passes_on) pass_on_squares(gradients[0], std::move(squares));
    return gradients;
  }

  variable_list rows_back(const at::Tensor& g, const at::Tensor& gamma) const {
    if (on.defined()) chain_gradient_(g, on, {}, {0, slope});
    const at::Tensor dx = needs_skip() && needs(0) ? g.clone() : g;
    const auto values = [this](int64_t first, int64_t last, at::ScalarType) {
      const int64_t from = first / axes.span, to = last / axes.span;
      return rows_of_map(adaptive.defined() ? adaptive.samples(from, to) : unpack_samples(packed, from, to));
    };
    const NormGradients sums = norm_back_(dx, {axes, /*training=*/true, gamma, rstd.unsqueeze(0), values}, needs(0),
                                          [&](const auto& run) { for_stretches_of(g.size(0), g.size(1), g.is_cuda(), run, axes.span); });
    return result(needs(0) ? dx : at::Tensor(), sums.gamma, sums.beta, needs_skip() ? g : at::Tensor());
  }
};

/// One pass over x. Statistics and seed of the call stand.
NormMapResult fused_rows(NormMapNode& node, const NormCall& call, const at::Tensor& rows, const NormMapOptions& after,
                         const CodecSpec& spec, const at::Tensor& spare) {
  const at::Tensor x = for_kernels(rows);
  NormMapInput in{in_sizes(rows, call.x.sizes(), call.axes),
                  x,
                  {call.known.mean.squeeze(0), call.known.rstd.squeeze(0)},
                  call.weights.gamma.detach(),
                  call.weights.beta.detach()};
  in.relu = after.activates;
  in.takes_ranges = call.saving.method.adaptive && call.saving.shares != nullptr;
  if (after.skip.defined()) in.skip = for_kernels(rows_of_map(after.skip.detach()));
  if (spare.defined() && spare.const_data_ptr() == x.const_data_ptr()) in.into = rows_of_map(spare);  // not where for_kernels() copied
  NormMapResult result;
  if (call.saving.method.adaptive) {
    const double bits = AdaptiveSave::norm_bits(spec, rows.numel() / call.x.size(0), call.saving);
    result = norm_map_encode_mixed(in, spec, call.seed, bits);
    node.adaptive = AdaptiveSave::of_norm(std::move(result.codes.mixed), call.saving);
  } else {
    result = norm_map_encode(in, spec, call.seed);
    node.packed = std::move(result.codes.fixed);
  }
  node.on = std::move(result.on);
  node.fused = true;
  return result;
}

/// The same bytes and numbers in passes of their own.
at::Tensor plain_rows(NormMapNode& node, const NormCall& call, const at::Tensor& rows, const NormMapOptions& after, const CodecSpec& spec) {
  const at::Tensor values = normalised(rows, call.known, call.axes);
  const at::Tensor map = in_sizes(values, call.x.sizes(), call.axes);
  if (call.saving.method.adaptive) {
    node.adaptive = AdaptiveSave(map, call.saving, /*ranges_only=*/true, call.seed);
  } else {
    node.packed = pack(map, spec, call.seed);
  }
  at::Tensor gamma = call.weights.gamma, beta = call.weights.beta;
  if (gamma.defined() != beta.defined()) {  // a chain has both or none
    if (!gamma.defined()) gamma = at::ones_like(beta);
    if (!beta.defined()) beta = at::zeros_like(gamma);
  }
  if (gamma.defined()) gamma = gamma.detach(), beta = beta.detach();
  const at::ScalarType type = rows.scalar_type();
  if (!after.skip.defined()) {
    if (after.activates) node.on = on_bits(values, gamma, beta);
    return apply_chain(values, gamma, beta, {}, {}, {0, after.activates ? after.slope : 1}).to(type);
  }
  const at::Tensor sum = apply_chain(values, gamma, beta, {}, {}, {0, 1}).add_(rows_of_map(after.skip.detach()));
  node.on = on_bits(sum, {}, {});
  return apply_chain(sum, {}, {}, {}, {}, {0, after.slope}).to(type);
}

/// Do the kernels serve? They know ReLU and no activation.
bool fuses(const NormCall& call, const at::Tensor& rows, const NormMapOptions& after, const CodecSpec& spec) {
  const bool known_kind = !after.activates || after.slope == 0;
  return known_kind && call.weights.gamma.defined() && call.weights.beta.defined() &&
         fuses_norm_map(in_sizes(rows, call.x.sizes(), call.axes), spec, call.saving.method.adaptive);
}

}  // namespace

bool serves_norm_map(const at::Tensor& x, const NormWeights& weights, const NormOptions& options, const Saving& saving) {
  const Method& method = saving.method;
  return is_map(x) && x.numel() > 0 && options.training && !method.plain && !method.shared && codes_normalised(method.norm) &&
         records(x, weights.gamma, weights.beta);
}

at::Tensor norm_map(const at::Tensor& x, const NormWeights& weights, const NormOptions& options, const NormMapOptions& after,
                    const Saving& saving, const at::Tensor& spare) {
  const NoAutocast no_autocast;
  NormCall call = norm_call(x, weights, Norm::batch, 0, options, saving);
  const CodecSpec spec = norm_spec(saving.method, call.width, 0);
  const at::Tensor rows = rows_of(call);
  call.known = statistics_of(rows, weights, call.axes, options);
  call.seed = fresh_seed(x.device());
  const bool adds = after.skip.defined();
  const auto node = adds ? make_node<NormMapNode>(saving.name, x, weights.gamma, weights.beta, after.skip)
                         : make_node<NormMapNode>(saving.name, x, weights.gamma, weights.beta);
  node->axes = call.axes;
  node->sizes = x.sizes().vec();
  node->rstd = call.known.rstd.squeeze(0);
  node->adds = adds;
  if (after.activates) node->slope = after.slope;
  if (weights.gamma.defined()) node->weight.emplace(weights.gamma, /*is_output=*/false);
  node->tells = saving.method.adaptive && saving.shares != nullptr && saving.shares->wants_gradient(0);  // of all layers or of none
  const auto out_of = [&](const at::Tensor& z) { return attach(in_sizes(z, x.sizes(), call.axes), node); };
  if (!fuses(call, rows, after, spec)) return out_of(plain_rows(*node, call, rows, after, spec));
  const NormMapResult result = fused_rows(*node, call, rows, after, spec, spare);
  at::Tensor out = out_of(result.z);
  if (result.z_ranges.defined()) pass_on_ranges(out, result.z_ranges);
  return out;
}

}  // namespace satchel
