#include "satchel/autograd/norm_share.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>

#include "satchel/autograd/input.h"
#include "satchel/autograd/map_rows.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/shared.h"
#include "satchel/tensor/norm_act.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

/// Keeps one SharedSave: the normalised values (the input itself without a norm), which side of the activation, the seed.
class NormActNode : public SharingNode {
 public:
  explicit NormActNode(const std::string& layer) : SharingNode("norm_act", layer) {}
  bool has_norm = true;
  NormAxes axes;
  bool training = true;
  std::vector<int64_t> sizes;  // of x
  at::Tensor rstd;
  double eps = 0;

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
    const at::Tensor gradient = gradient_rows(std::move(g), axes, shared_->channels());
    const auto result = [&](const at::Tensor& gamma, const at::Tensor& beta) {
      variable_list all{needs(0) ? in_sizes(gradient, sizes, axes) : at::Tensor(), gamma, beta};
      all.resize(num_outputs());
      return all;
    };
    if (num_outputs() > 3 && is_heard(*next_edge(3).function)) {  // the norm that was taken over makes the gradients of its inputs
      const SharedRows rows(*shared_);
      rows.for_stretches([&](int64_t first, int64_t last) { rows.gradient_(gradient.narrow(0, first, last - first), first); });
      return {{}, {}, {}, in_sizes(gradient, sizes, axes)};
    }
    if (has_norm && axes.by_channel() && fuses_norm_act(shared_->code)) {
      const ThirdPlane& third = shared_->share.third;
      const NormActSums sums = norm_act_sums(gradient, shared_->code, shared_->seed, shared_->chain, third);
      if (needs(0)) norm_act_back_(gradient, shared_->code, shared_->seed, shared_->chain, rstd, sums, training, third);
      return result(sums.gamma, sums.beta);
    }
    const SharedRows rows(*shared_);
    rows.for_stretches([&](int64_t first, int64_t last) { rows.gradient_(gradient.narrow(0, first, last - first), first); });
    if (!has_norm) return result({}, {});
    const auto values = [&](int64_t first, int64_t last, at::ScalarType type) { return rows.values(first, last, type); };
    const int64_t unit = axes.groups > 0 ? axes.span : 1;
    NormBack norm{axes, training, rows.gamma(), rstd, values};
    if (shared_->code.spec.side != Side::one_sided) norm.eps = eps;  // its off values have another variance, and no gradient
    const NormGradients sums = norm_back_(gradient, norm, needs(0), [&](const auto& run) {
      for_stretches_of(gradient.size(0), gradient.size(1), gradient.is_cuda(), run, unit);
    });
    return result(sums.gamma, sums.beta);
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

/// γ and β of the call; 1 and 0 where it has none.
Affine affine_of(const NormCall& call) {
  const auto floats = call.x.options().dtype(at::kFloat).memory_format(c10::nullopt);
  const auto& [gamma, beta, mean, var] = call.weights;
  return {gamma.defined() ? gamma.detach() : at::ones({call.width}, floats),
          beta.defined() ? beta.detach() : at::zeros({call.width}, floats)};
}

/// The thing to keep of rows x, which the norm (if any) has normalised.
SharedSave save_of(const at::Tensor& x, const Affine& affine, const CodecSpec& spec, Activation activation, const at::Tensor& seed,
                   const MapShare& share) {
  const bool normed = affine.gamma.defined();
  SharedSave save;
  save.share = share;
  if (share.third.defined()) {
    save.code = pack_third(x, spec, seed, affine.gamma, affine.beta, share.third);
  } else if (spec.side != Side::none && normed) {
    save.code = pack_side(x, spec, seed, affine.gamma, affine.beta);
  } else {
    save.code = pack(x, spec, seed);
  }
  if (spec.side == Side::none && normed) {
    save.gamma = affine.gamma.clone();
    save.beta = affine.beta.clone();
  }
  if (spec.side == Side::none && activation != Activation::none) save.mask = on_bits(x, save.gamma, save.beta);
  return save;
}

/// `out` as the output of a node that keeps `save`.
at::Tensor with_node(const NormCall& call, const NormActOptions& options, const at::Tensor& rstd, SharedSave save, const at::Tensor& rows) {
  const auto node = make_node<NormActNode>(call.saving.name, call.x, call.weights.gamma, call.weights.beta);
  node->has_norm = options.norm != Norm::none;
  node->axes = call.axes;
  node->training = options.training();
  node->sizes = call.x.sizes().vec();
  node->rstd = rstd;
  node->eps = options.statistics.eps;
  if (call.by_map() && call.x.dim() > 2) save.sizes = node->sizes;
  if (save.share.shares != nullptr) {
    watch(save.share, save.code, call.x.size(0), options.norm == Norm::none ? at::Tensor() : affine_of(call).gamma);
  }
  const at::Tensor out = attach(in_sizes(rows, call.x.sizes(), call.axes), node);
  node->share(std::move(save), out);
  take_over(call, node);
  return out;
}

/// Bits of the map that the call makes, where they are shared out: of maps alone, whose samples are stretches of rows.
MapShare share_of(const NormCall& call, CodecSpec& spec, bool splits) {
  return call.by_map() ? share_of_map(call.x.sizes(), call.x.device(), call.saving, spec, splits) : MapShare();
}

/// One pass over x where the fused kernels fit.
at::Tensor fused_norm_act(const NormCall& call, const at::Tensor& rows, const NormActOptions& options, CodecSpec spec,
                          const ChainOptions& chain, const at::Tensor& spare) {
  const NormWeights& w = call.weights;
  const Affine affine = affine_of(call);
  ColumnMoments moments;
  if (call.known.rstd.defined()) {
    moments = {call.known.mean.squeeze(0), call.known.rstd.squeeze(0)};
  } else if (options.training()) {
    moments = column_moments(rows, w.running_mean, w.running_var, options.statistics.eps, options.statistics.momentum);
  } else {
    moments = {w.running_mean, w.running_var.add(options.statistics.eps).rsqrt_()};
  }
  const at::Tensor seed = call.seed.defined() ? call.seed : fresh_seed(call.x.device());
  const at::Tensor into = spare.defined() ? rows_of_map(spare) : spare;
  SharedSave save;
  save.share = share_of(call, spec, /*splits=*/true);
  NormActResult result = norm_act_encode(rows, moments, affine.gamma, affine.beta, spec, seed, chain, into, save.share.third);
  save.code = std::move(result.code);
  save.chain = chain;
  if (chain.dropout > 0) save.seed = seed;
  return with_node(call, options, moments.rstd, std::move(save), result.z);
}

}  // namespace

at::Tensor shared_norm_act(const NormCall& call, const NormActOptions& options, const at::Tensor& spare) {
  const NoAutocast no_autocast;
  const bool normed = options.norm != Norm::none, recorded = records(call.x, call.weights.gamma, call.weights.beta);
  CodecSpec spec = shared_spec(call.saving.method, normed && !call.axes.by_channel() ? Norm::layer : options.norm, options.activation,
                               call.width, call.count());
  const ChainOptions chain{options.training() ? options.dropout : 0, slope_of(options)};
  const at::Tensor rows = rows_of(call);
  if (normed && call.axes.by_channel() && recorded && fuses_norm_act(rows, spec)) {
    return fused_norm_act(call, rows, options, spec, chain, spare);
  }
  Statistics s = call.known;
  if (normed && !s.rstd.defined()) s = statistics_of(rows, call.weights, call.axes, options.statistics);
  // Without a norm ReLU comes first: the chain below would make NaN of −∞ · 0.
  const at::Tensor plain = !normed && options.activation == Activation::relu ? at::relu(rows) : rows;
  const at::Tensor values = normed ? normalised(rows, s, call.axes) : plain;
  const at::Tensor seed = call.seed.defined() ? call.seed : fresh_seed(call.x.device());
  const Affine affine = normed ? affine_of(call) : Affine();
  const auto finish = [&] {
    const at::Tensor drawn = chain.dropout > 0 ? seed : at::Tensor();
    return apply_chain(values, affine.gamma, affine.beta, {}, drawn, chain).to(call.x.scalar_type());
  };
  if (!recorded) return in_sizes(finish(), call.x.sizes(), call.axes);
  const MapShare share = share_of(call, spec, values.is_cpu());
  SharedSave save = save_of(values, affine, spec, options.activation, seed, share);
  save.chain = chain;
  if (chain.dropout > 0) save.seed = seed;
  return with_node(call, options, s.rstd, std::move(save), finish());
}

std::optional<at::Tensor> after_norm(const at::Tensor& x, Activation activation, double slope) {
  const std::optional<NormCall> norm = take_norm(x);
  if (!norm) return std::nullopt;
  NormActOptions options;
  options.norm = norm->axes.norm;
  options.activation = activation;
  options.slope = slope;
  options.statistics = norm->options;
  return shared_norm_act(*norm, options);
}

at::Tensor shared_relu(const at::Tensor& x, const Saving& saving) {
  if (auto out = after_norm(x, Activation::relu, 0)) return *out;
  const NoAutocast no_autocast;
  const NormCall call = plain_call(x, saving);
  NormActOptions options;
  options.norm = Norm::none;
  const at::Tensor rows = at::relu(rows_of(call)), seed = fresh_seed(x.device());
  CodecSpec spec = shared_spec(saving.method, Norm::none, Activation::relu, call.width, 0);
  const MapShare share = share_of(call, spec, rows.is_cpu());
  SharedSave save = save_of(rows, {}, spec, Activation::relu, seed, share);
  save.chain = {0, 0};
  return with_node(call, options, {}, std::move(save), rows);
}

at::Tensor spare_memory(const at::Tensor& x) {
  const bool alone = x.use_count() == 1 && x.storage().use_count() == 1 && x.grad_fn() != nullptr && !x.is_view();
  return alone && (is_map(x) ? is_channels_last(x) : x.is_contiguous()) ? x.variable_data() : at::Tensor();
}

}  // namespace satchel
