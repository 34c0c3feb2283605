#include "satchel/autograd/norm_act.h"

#include <cmath>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/elu_dropout.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/norm_chain.h"
#include "satchel/autograd/shared.h"
#include "satchel/autograd/statistics.h"
#include "satchel/core/error.h"
#include "satchel/tensor/norm_act.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

/// Keeps one SharedSave: the normalised values (the input itself without a norm), which side of the activation, the seed.
class NormActNode : public SharingNode {
 public:
  explicit NormActNode(const std::string& layer) : SharingNode("norm_act", layer) {}
  Norm norm = Norm::batch;
  bool training = true;
  at::Tensor rstd;

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    report(*shared_, layer(), kept);
    if (rstd.defined()) {
      const auto bytes = static_cast<int64_t>(rstd.nbytes());
      kept.push_back({layer(), "statistics", {rstd.numel()}, 32, bytes, bytes});
    }
    if (shared_->seed.defined()) kept.push_back(saved_line(layer(), "seed", shared_->seed));
    return kept;
  }

 protected:
  variable_list back(at::Tensor g) override {
    at::Tensor gradient = own(std::move(g));
    if (norm == Norm::batch && fuses_norm_act(shared_->code)) {
      const NormActSums sums = norm_act_sums(gradient, shared_->code, shared_->seed, shared_->chain);
      if (needs(0)) norm_act_back_(gradient, shared_->code, shared_->seed, shared_->chain, rstd, sums, training);
      return {needs(0) ? gradient : at::Tensor(), sums.gamma, sums.beta};
    }
    const SharedRows rows(*shared_);
    const auto stretches = [&](const auto& run) { rows.for_stretches(run); };
    stretches([&](int64_t first, int64_t last) { rows.gradient_(gradient.narrow(0, first, last - first), first); });
    if (norm == Norm::none) return {gradient, {}, {}};
    const auto values = [&](int64_t first, int64_t last) { return rows.values(first, last); };
    const NormGradients sums = norm_back_(gradient, {norm, training, rows.gamma(), rstd, values}, needs(0), stretches);
    return {needs(0) ? gradient : at::Tensor(), sums.gamma, sums.beta};
  }

  void release() override {
    shared_.reset();
    rstd.reset();
  }
};

double slope_of(const NormActOptions& options) {
  switch (options.activation) {
    case Activation::relu: return 0;
    case Activation::leaky_relu: return options.slope;
    default: return 1;
  }
}

/// The thing to keep of x, which the norm (if any) has normalised.
SharedSave save_of(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const at::Tensor& seed,
                   const Method& method) {
  const CodecSpec spec = shared_spec(method, options.norm, options.activation, x.size(1));
  const bool affine = options.norm != Norm::none;
  SharedSave save;
  if (spec.side != Side::none && affine) {
    save.code = pack_side(x, spec, seed, weights.gamma, weights.beta);
  } else {
    save.code = pack(x, spec, seed);
  }
  if (spec.side == Side::none && affine) {
    save.gamma = weights.gamma.detach().clone();
    save.beta = weights.beta.detach().clone();
  }
  if (spec.side == Side::none && options.activation != Activation::none) save.mask = on_bits(x, save.gamma, save.beta);
  return save;
}

/// x's memory to write over, where a recorded function made x and nobody but this call holds it; else undefined. A node that saved its own
/// output, or a view, would show in the storage's count.
at::Tensor spare_memory(const at::Tensor& x) {
  const bool alone = x.use_count() == 1 && x.storage().use_count() == 1 && x.grad_fn() != nullptr && !x.is_view() && x.is_contiguous();
  return alone ? x.variable_data() : at::Tensor();
}

/// One pass over x where the fused kernels fit.
at::Tensor fused_norm_act(const at::Tensor& x, const NormWeights& w, const NormActOptions& options, const CodecSpec& spec,
                          const Saving& saving) {
  const at::Tensor spare = spare_memory(x);  // first: every other name for x counts
  const at::Tensor rows = x.detach().contiguous(), gamma = w.gamma.detach(), beta = w.beta.detach();
  ColumnMoments moments;
  if (options.training()) {
    moments = column_moments(rows, w.running_mean, w.running_var, options.statistics.eps, options.statistics.momentum);
  } else {
    moments = {w.running_mean, w.running_var.add(options.statistics.eps).rsqrt_()};
  }
  const ChainOptions chain{options.training() ? options.dropout : 0, slope_of(options)};
  const at::Tensor seed = fresh_seed(x.device());
  NormActResult result = norm_act_encode(rows, moments, gamma, beta, spec, seed, chain, spare);
  const auto node = make_node<NormActNode>(saving.name, x, w.gamma, w.beta);
  node->norm = Norm::batch;
  node->training = options.training();
  node->rstd = moments.rstd;
  SharedSave save;
  save.code = std::move(result.code);
  save.chain = chain;
  if (chain.dropout > 0) save.seed = seed;
  const at::Tensor out = attach(std::move(result.z), node);
  node->share(std::move(save), out);
  return out;
}

at::Tensor shared_norm_act(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const Saving& saving) {
  const bool affine = options.norm != Norm::none;
  const CodecSpec spec = shared_spec(saving.method, options.norm, options.activation, x.size(1));
  if (options.norm == Norm::batch && records(x, weights.gamma, weights.beta) && fuses_norm_act(x, spec)) {
    return fused_norm_act(x, weights, options, spec, saving);
  }
  const at::Tensor rows = x.detach().contiguous();
  Statistics s;
  if (affine) s = statistics_of(rows, weights, options.norm, options.statistics);
  const at::Tensor values = affine ? normalised(rows, s) : rows;
  const ChainOptions chain{options.training() ? options.dropout : 0, slope_of(options)};
  const at::Tensor seed = fresh_seed(x.device());
  const at::Tensor gamma = affine ? weights.gamma.detach() : at::Tensor(), beta = affine ? weights.beta.detach() : at::Tensor();
  const auto finish = [&] {
    return apply_chain(values, gamma, beta, {}, chain.dropout > 0 ? seed : at::Tensor(), chain).to(x.scalar_type());
  };
  if (!records(x, weights.gamma, weights.beta)) return finish();

  const auto node = make_node<NormActNode>(saving.name, x, weights.gamma, weights.beta);
  SharedSave save = save_of(values, weights, options, seed, saving.method);
  save.chain = chain;
  if (chain.dropout > 0) save.seed = seed;
  node->norm = options.norm;
  node->training = options.training();
  node->rstd = s.rstd;
  const at::Tensor out = attach(finish(), node);
  node->share(std::move(save), out);
  return out;
}

at::Tensor activated(const at::Tensor& x, const NormActOptions& options, const Saving& saving) {
  switch (options.activation) {
    case Activation::relu: return relu(x, saving);
    case Activation::leaky_relu: return leaky_relu(x, options.slope, saving);
    case Activation::elu: return elu(x, options.alpha, saving);
    case Activation::none: return x;
  }
  return x;
}

at::Tensor norm_of(const at::Tensor& x, const NormWeights& weights, const NormActOptions& options, const Saving& saving) {
  switch (options.norm) {
    case Norm::batch: return batch_norm(x, weights, options.statistics, saving);
    case Norm::layer: return layer_norm(x, weights, options.statistics, saving);
    case Norm::none: return x;
  }
  return x;
}

}  // namespace

at::Tensor norm_act(at::Tensor x, const NormWeights& weights, const NormActOptions& options, const Saving& saving) {
  constexpr const char* op = "norm_act";
  check_norm(x, weights, options.norm, options.statistics, op);
  check_dropout(options.dropout, op);
  if (!std::isfinite(options.slope)) fail(op, "slope must be finite", options.slope);
  if (!(options.alpha >= 0) || !std::isfinite(options.alpha)) fail(op, "alpha must be finite and at least 0", options.alpha);
  const double p = options.training() ? options.dropout : 0;
  const bool evaluates = !options.training() && !records(x, weights.gamma, weights.beta);
  const bool nothing_to_share = options.norm == Norm::none && options.activation == Activation::none;
  // Methods that keep each function's own: the same saves in one pass each way.
  if (fuses_norm_chain(x, weights, options, saving)) return norm_chain(x, weights, options, saving, spare_memory(x));
  if (saving.method.plain || !saving.method.shared || evaluates || nothing_to_share) {
    return dropout(activated(norm_of(x, weights, options, saving), options, saving), p, true, saving);
  }
  if (options.activation == Activation::elu) {
    const at::Tensor h = norm_of(x, weights, options, saving);
    return records(h) ? elu_dropout(h, options.alpha, p, saving) : dropout(elu(h, options.alpha, saving), p, true, saving);
  }
  return shared_norm_act(x, weights, options, saving);
}

}  // namespace satchel
