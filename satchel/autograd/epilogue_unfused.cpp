// The epilogue in passes of their own: what every other kernel is compared with, on any device and for every method.
#include <ATen/ops/add.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "satchel/autograd/epilogue_node.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/tensor/chain.h"
#include "satchel/tensor/epilogue.h"
#include "satchel/tensor/pack.h"
#include "satchel/tensor/row_norm.h"

namespace satchel {

void take_statistics(EpilogueCall& call, const at::Tensor& rows) {
  if (!call.has_norm() || call.known.rstd.defined()) return;
  call.known = statistics_of(rows, call.weights, call.axes, call.options);
  if (!call.options.training && call.axes.by_channel()) call.known.mean = call.known.mean.clone();  // not the running one, which changes
}

at::Tensor norm_seed(const EpilogueCall& call) { return call.seed.defined() ? call.seed : fresh_seed(call.x.device()); }

ImageBits sample_bits(const EpilogueCall& call, const Keep& keep, CodecSpec& spec, bool splits) {
  if (keep.mean_bits == 0) return {};
  return image_bits(call.x.sizes(), call.x.device(), call.saving, keep.mean_bits, spec, splits);
}

Affine affine_of(const EpilogueCall& call) {
  const auto floats = call.x.options().dtype(at::kFloat).memory_format(c10::nullopt);
  const auto& [gamma, beta, mean, var] = call.weights;
  return {gamma.defined() ? gamma.detach() : at::ones({call.width}, floats),
          beta.defined() ? beta.detach() : at::zeros({call.width}, floats)};
}

void keep_norm(EpilogueSaves& saves, const EpilogueCall& call, const Keep& keep, const at::Tensor& rows, const at::Tensor& values) {
  if (keep.of == Of::input) saves.mean = call.known.mean;
  at::Tensor kept = keep.of == Of::input ? rows : values;
  // Blocks of samples, as the papers have them; layers that share code rows.
  if (call.is_image() && !reads_producer(call.saving.method)) kept = call.in_sizes(kept);
  saves.norm = Saved(kept, call.saving, keep, call.seed);
}

at::Tensor norm_output(const EpilogueCall& call, const at::Tensor& rows) {
  const at::Tensor gamma = call.weights.gamma.defined() ? call.weights.gamma.detach() : at::Tensor();
  const at::Tensor beta = call.weights.beta.defined() ? call.weights.beta.detach() : at::Tensor();
  if (call.is_image() && call.axes.by_channel()) {
    const Affine line = folded(call.known, gamma, beta);
    return apply_chain(rows, line.gamma, line.beta, {}, {}, {0, 1});
  }
  const at::Tensor values = normalised(rows, call.known, call.axes);
  if (gamma.defined() && beta.defined()) return at::addcmul(beta, values, gamma).to(rows.scalar_type());
  if (gamma.defined()) values.mul_(gamma);
  if (beta.defined()) values.add_(beta);
  return values.to(rows.scalar_type());
}

namespace {

/// What the activation makes of `rows`, without the chain's products: it would make NaN of −∞ · 0.
at::Tensor activation_of(const EpilogueCall& call, const at::Tensor& rows) {
  switch (call.activation) {
    case Activation::relu: return at::relu(rows);
    case Activation::leaky_relu: return at::leaky_relu(rows, call.slope);
    case Activation::elu: return at::elu(rows, call.alpha);
    case Activation::none: return rows;
  }
  return rows;
}

/// Codes `values`, rows; `affine` with γ and β where they are normalised ones.
SharedSave code_of(const EpilogueCall& call, const Keep& keep, const at::Tensor& values, const Affine& affine, const at::Tensor& seed) {
  CodecSpec spec = keep.spec;
  SharedSave save;
  save.bits = sample_bits(call, keep, spec, values.is_cpu());
  const bool sides = spec.side != Side::none;
  save.code = pack_extra_bit(values, spec, seed, sides ? affine.gamma : at::Tensor(), sides ? affine.beta : at::Tensor(), save.bits.extra);
  if (sides) return save;
  if (affine.gamma.defined()) {
    save.gamma = affine.gamma.clone();
    save.beta = affine.beta.clone();
  }
  if (call.activation != Activation::none) save.mask = on_bits(values, save.gamma, save.beta);
  return save;
}

at::Tensor unfused_norm(EpilogueCall& call, const at::Tensor& rows) {
  take_statistics(call, rows);
  return norm_output(call, rows);
}

void pack_norm(const EpilogueCall& call, const Keep& keep, const at::Tensor& rows, EpilogueSaves& saves) {
  if (!rows.is_cuda() || !call.is_image() || !call.axes.by_channel()) {
    return keep_norm(saves, call, keep, rows, normalised(rows, call.known, call.axes));
  }
  const Affine plain = folded(call.known, {}, {});  // one pass
  keep_norm(saves, call, keep, rows, apply_chain(rows, plain.gamma, plain.beta, {}, {}, {0, 1}));
}

/// A norm by row and a smooth activation, which reads the norm's output as it stands.
at::Tensor smooth_forward(EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows, EpilogueSaves& saves) {
  call.seed = norm_seed(call);
  pack_norm(call, *find(keeps, Kind::norm), rows, saves);
  const at::Tensor y = call.as_rows(call.normed);
  const SmoothValues made = smooth_values(y, call.smooth);
  saves.derivative = pack(made.slope, find(keeps, Kind::derivative)->spec, fresh_seed(call.x.device()));
  saves.derivative.dtype = y.scalar_type();
  return made.z;
}

/// Dropout as a function of its own, whose seed is drawn last.
at::Tensor dropped(EpilogueSaves& saves, const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows) {
  if (call.dropout == 0) return rows;
  const at::Tensor seed = fresh_seed(call.x.device());
  if (find(keeps, Kind::dropout) != nullptr) {
    saves.dropout_mask = pack_mask(apply_chain(at::ones_like(rows), {}, {}, {}, seed, {call.dropout, 1})).bits;
  } else {
    saves.dropout_seed = seed;
  }
  return apply_chain(rows, {}, {}, {}, seed, {call.dropout, 1});
}

/// x̂ in one code for norm, activation and the next layer.
at::Tensor share_normalised(EpilogueCall& call, const Keep& keep, const at::Tensor& rows, EpilogueSaves& saves) {
  const at::Tensor values = normalised(rows, call.known, call.axes), seed = norm_seed(call);
  const Affine affine = affine_of(call);
  SharedSave save = code_of(call, keep, values, affine, seed);
  save.chain = {call.dropout, call.slope};
  if (call.dropout > 0) save.seed = seed;
  const at::Tensor drawn = save.seed, z = apply_chain(values, affine.gamma, affine.beta, {}, drawn, save.chain);
  saves.code = std::make_shared<SharedSave>(std::move(save));
  saves.code_is_normalised = true;
  return z.to(rows.scalar_type());
}

/// What the activation reads. Normalised values that stand are used, in float32.
at::Tensor before_activation(const EpilogueCall& call, const at::Tensor& rows, const at::Tensor& values) {
  if (!call.has_norm()) return rows;
  if (!values.defined() && !call.skip.defined()) return norm_output(call, rows);
  const Affine affine = affine_of(call);
  const at::Tensor hat = values.defined() ? values : normalised(rows, call.known, call.axes);
  const at::Tensor y = apply_chain(hat, affine.gamma, affine.beta, {}, {}, {0, 1});
  return call.skip.defined() ? y.add_(rows_of_image(call.skip.detach())) : y;
}

at::Tensor unfused_forward(EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows, EpilogueSaves& saves) {
  take_statistics(call, rows);
  saves.rstd = call.known.rstd;
  if (call.smooth != Smooth::none) return smooth_forward(call, keeps, rows, saves);
  const Keep *norm = find(keeps, Kind::norm), *shared = find(keeps, Kind::shared);
  const Keep* code = shared != nullptr ? shared : find(keeps, Kind::activation);
  if (code != nullptr && code->of == Of::normalised) return share_normalised(call, *code, rows, saves);
  at::Tensor values;
  if (norm != nullptr && saves.reads_values) {
    call.seed = norm_seed(call);
    if (norm->of == Of::normalised) values = normalised(rows, call.known, call.axes);
    keep_norm(saves, call, *norm, rows, values);
  }
  const at::Tensor y = before_activation(call, rows, values);
  const at::Tensor z = activation_of(call, y).to(rows.scalar_type());
  if (code == nullptr) {
    if (find(keeps, Kind::mask) != nullptr) saves.on = on_bits(y, {}, {});
    return dropped(saves, call, keeps, z);
  }
  const at::Tensor seed = fresh_seed(call.x.device());
  SharedSave save = code_of(call, *code, code->of == Of::input ? y : z, {}, seed);
  // The code is of what the chain makes of it: a ReLU's and an ELU's result, or what a LeakyReLU reads.
  save.chain = {0, call.activation == Activation::elu ? 1 : call.slope};
  if (shared != nullptr && call.dropout > 0) {
    save.chain.dropout = call.dropout;
    save.seed = seed;
  }
  saves.code = std::make_shared<SharedSave>(std::move(save));
  if (shared == nullptr) return dropped(saves, call, keeps, z);
  return call.dropout > 0 ? apply_chain(z, {}, {}, {}, seed, {call.dropout, 1}) : z;
}

/// What the norm's gradient reads of what the node keeps; nothing is decoded yet.
NormBack kept_norm(const EpilogueSaves& saves) {
  if (saves.code_is_normalised) return norm_from_code(saves, saves.code);
  if (saves.norm.defined() && !saves.norm.has_bits_per_sample() && saves.norm.shape().size() == 2) {
    const auto own = std::make_shared<SharedSave>();
    own->code = saves.norm.packed();
    return norm_from_code(saves, own);
  }
  NormBack norm = norm_of(saves);
  norm.gamma = saves.gamma_values();
  const int64_t span = std::max<int64_t>(saves.axes.span, 1);
  norm.unit = span;
  norm.values = [&saves, span](int64_t first, int64_t last, at::ScalarType) {
    return rows_of_image(saves.norm.samples(first / span, last / span));
  };
  return norm;
}

EpilogueGradients kept_back(const EpilogueSaves& saves, const at::Tensor& g, const EpilogueWants& wants) {
  return unfused_back(saves, g, wants, kept_norm(saves));
}

}  // namespace

void gate_gradient_(const EpilogueSaves& saves, const at::Tensor& g) {
  if (saves.derivative.bytes.defined()) g.mul_(unpack(saves.derivative).view(g.sizes()));
  if (saves.dropout_mask.defined()) {
    chain_gradient_(g, saves.dropout_mask, {}, {0, 0});
    g.mul_(dropout_scale(saves.dropout));
  }
  if (saves.dropout_seed.defined()) chain_gradient_(g, {}, saves.dropout_seed, {saves.dropout, 1});
  if (saves.on.defined()) chain_gradient_(g, saves.on, {}, {0, saves.slope});
  if (saves.code == nullptr) return;
  const SharedRows rows(*saves.code);
  rows.for_stretches([&](int64_t first, int64_t last) {
    const at::Tensor part = g.narrow(0, first, last - first);
    rows.gradient_(part, first);
    // ELU's derivative is its result + α where that is off (docs/theory.md 8).
    if (saves.activation == Activation::elu) part.mul_(rows.values(first, last).add_(saves.alpha).masked_fill_(rows.on(first, last), 1));
  });
}

NormBack norm_of(const EpilogueSaves& saves) {
  NormBack norm{saves.axes, saves.options.training, {}, saves.rstd, {}, saves.mean};
  if (saves.axes.groups > 0) norm.unit = saves.axes.span;
  return norm;
}

NormBack norm_from_code(const EpilogueSaves& saves, std::shared_ptr<const SharedSave> save) {
  NormBack norm = norm_of(saves);
  const auto rows = std::make_shared<const SharedRows>(*save);
  norm.gamma = rows->gamma().defined() ? rows->gamma() : saves.gamma_values();
  // A one-sided code's off values have another variance, and no gradient.
  if (save->code.spec.side != Side::one_sided) norm.eps = saves.eps;
  norm.values = [save, rows](int64_t first, int64_t last, at::ScalarType type) { return rows->values(first, last, type); };
  return norm;
}

EpilogueGradients unfused_back(const EpilogueSaves& saves, const at::Tensor& g, const EpilogueWants& wants, const NormBack& norm) {
  gate_gradient_(saves, g);
  EpilogueGradients result;
  if (wants.skip) result.skip = g;
  if (!saves.has_norm()) {
    if (wants.x) result.x = wants.skip ? g.clone() : g;
    return result;
  }
  const at::Tensor dx = wants.skip && wants.x ? g.clone() : g;
  if (wants.x) result.x = dx;
  if (!saves.reads_values && !saves.code_is_normalised) {
    const at::Tensor gamma = saves.gamma_values(), rstd = saves.rstd.squeeze(0);
    if (wants.beta) result.beta = dx.sum(at::IntArrayRef{0}, /*keepdim=*/false, at::kFloat);
    if (wants.x) dx.mul_(gamma.defined() ? at::mul(gamma, rstd) : rstd);
    return result;
  }
  const NormGradients sums = norm_back_(dx, norm, wants.x);
  result.gamma = sums.gamma;
  result.beta = sums.beta;
  return result;
}

const EpilogueKernel kUnfusedEpilogue = {"unfused", [](const auto&...) { return true; }, unfused_forward, kept_back, unfused_norm,
                                         pack_norm};

}  // namespace satchel
