#include "tests/autograd/pairs.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/smooth.h"
#include "satchel/core/keep.h"
#include "satchel/plan/kept_line.h"

namespace satchel::test {
namespace {

constexpr const char* kNormNames[] = {"batch", "layer", "group", "rms"};
constexpr const char* kActivationNames[] = {"none", "relu", "leaky_relu", "elu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid"};
constexpr const char* kLayoutNames[] = {"rows", "nchw", "channels_last"};
constexpr double kEps = 1e-5;

const std::vector<int64_t> kRowSizes = {48, 32}, kImageSizes = {6, 8, 5, 3};

constexpr int64_t kMostDraws = 4;  // of one call

/// For whichever draw of a call dropout's is.
at::Tensor mask_seeds() { return at::full({kMostDraws}, 4711, at::kLong); }

bool is_smooth(PairActivation a) { return a >= PairActivation::gelu; }

Activation gate_of(PairActivation a) {
  switch (a) {
    case PairActivation::relu: return Activation::relu;
    case PairActivation::leaky_relu: return Activation::leaky_relu;
    case PairActivation::elu: return Activation::elu;
    default: return Activation::none;
  }
}

bool has_norm_act(const Pair& p) {
  const bool norm = p.norm == PairNorm::batch || (p.norm == PairNorm::layer && !p.is_image());
  return norm && !is_smooth(p.activation);
}

std::unique_ptr<SeedBank> masks_of(const Pair& p) {
  return p.dropout > 0 && p.fixed_masks ? std::make_unique<SeedBank>(mask_seeds()) : nullptr;
}

at::Tensor fused_pair(const Pair& p, const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, const SavePolicy& s) {
  NormActOptions options;
  options.norm = p.norm == PairNorm::batch ? Norm::batch : Norm::layer;
  options.activation = gate_of(p.activation);
  options.slope = kPairSlope;
  options.dropout = p.dropout;
  options.statistics.eps = kEps;
  const std::unique_ptr<SeedBank> masks = masks_of(p);
  return norm_act(x, {gamma, beta, {}, {}}, options, s);
}

at::Tensor our_norm(const Pair& p, const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, const SavePolicy& s) {
  const NormWeights weights{gamma, beta, {}, {}};
  const std::vector<int64_t> shape = weight_sizes(p, x.sizes());
  switch (p.norm) {
    case PairNorm::batch: return batch_norm(x, weights, {kEps}, s);
    case PairNorm::layer: return layer_norm(x, shape, weights, {kEps}, s);
    case PairNorm::group: return group_norm(x, kPairGroups, weights, {kEps}, s);
    case PairNorm::rms: return rms_norm(x, shape, gamma, kEps, s);
  }
  return x;
}

at::Tensor torch_norm_of(const Pair& p, const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta) {
  const std::vector<int64_t> shape = weight_sizes(p, x.sizes());
  switch (p.norm) {
    case PairNorm::batch: return at::batch_norm(x, gamma, beta, {}, {}, /*training=*/true, 0.1, kEps, false);
    case PairNorm::layer: return at::layer_norm(x, shape, gamma, beta, kEps);
    case PairNorm::group: return at::group_norm(x, kPairGroups, gamma, beta, kEps);
    case PairNorm::rms: return at::rms_norm(x, shape, gamma, kEps);
  }
  return x;
}

at::Tensor our_activation(PairActivation a, const at::Tensor& x, const SavePolicy& s) {
  switch (a) {
    case PairActivation::none: return x;
    case PairActivation::relu: return relu(x, s);
    case PairActivation::leaky_relu: return leaky_relu(x, kPairSlope, s);
    case PairActivation::elu: return elu(x, 1.0, s);
    case PairActivation::gelu: return gelu(x, "none", s);
    case PairActivation::gelu_tanh: return gelu(x, "tanh", s);
    case PairActivation::silu: return silu(x, s);
    case PairActivation::tanh: return satchel::tanh(x, s);
    case PairActivation::sigmoid: return satchel::sigmoid(x, s);
  }
  return x;
}

at::Tensor torch_activation_of(PairActivation a, const at::Tensor& x) {
  switch (a) {
    case PairActivation::none: return x;
    case PairActivation::relu: return at::relu(x);
    case PairActivation::leaky_relu: return at::leaky_relu(x, kPairSlope);
    case PairActivation::elu: return at::elu(x);
    case PairActivation::gelu: return at::gelu(x);
    case PairActivation::gelu_tanh: return at::gelu(x, "tanh");
    case PairActivation::silu: return at::silu(x);
    case PairActivation::tanh: return at::tanh(x);
    case PairActivation::sigmoid: return at::sigmoid(x);
  }
  return x;
}

ConvOptions padded() {
  ConvOptions options;
  options.padding = {1};
  return options;
}

int64_t product_of(at::IntArrayRef sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

/// The pair's lines, function by function or shared, from what core/keep.h says of its sites.
class PlannedLines {
 public:
  PlannedLines(const Pair& pair, at::IntArrayRef x, const Method& method) : pair_(pair), sizes_(x.vec()), method_(method) {
    values_ = product_of(x);
    channels_ = x[1];
    width_ = pair.is_flat() ? values_ / x[0] : channels_;
  }

  std::vector<SavedTensor> make() {
    if (pair_.fused) return fused();
    const Activation gate = gate_of(pair_.activation);
    // In methods that share, ReLU and LeakyReLU take over the norm's code, and so does the layer that reads a norm alone. A convolution
    // cannot read the rows of a norm over C×H×W.
    const bool claims = gate == Activation::relu || gate == Activation::leaky_relu;
    const bool shared = reads_producer(method_) && (claims || (pair_.activation == PairActivation::none && !pair_.is_flat()));
    bool served = shared && !pair_.is_flat();
    add_norm(shared ? gate : Activation::none, shared, /*drops=*/false);
    if (!shared && gate != Activation::none) served = add_gate(gate);
    if (is_smooth(pair_.activation)) add(keeps_of(method_, {Role::derivative}), sizes_, sizes_, 0);
    add_dropout();
    if (!served) add_input();
    return std::move(lines_);
  }

 private:
  /// One site, but for images of methods that keep each function's own: they have dropout apart, and ELU.
  std::vector<SavedTensor> fused() {
    const Activation gate = gate_of(pair_.activation);
    const bool apart = pair_.is_image() && !reads_producer(method_), own_elu = apart && gate == Activation::elu;
    const bool served = add_norm(own_elu ? Activation::none : gate, !own_elu, !apart && pair_.dropout > 0);
    if (own_elu) add_gate(gate);
    if (apart) add_dropout();
    if (!served) add_input();
    return std::move(lines_);
  }

  std::vector<int64_t> rows(int64_t width) const { return {values_ / width, width}; }

  void add_dropout() {
    if (pair_.dropout == 0) return;
    Site site;
    site.drops = true;
    add(keeps_of(method_, site), rows(channels_), sizes_, 0);
  }

  void add_input() { add(keeps_of(method_, {Role::weight_input}), sizes_, sizes_, 0); }

  /// Does the next layer rebuild its input from it?
  bool add_norm(Activation gate, bool shared, bool drops) {
    Site site;
    site.drops = drops;
    site.norm = pair_.norm == PairNorm::batch ? Norm::batch : Norm::layer;
    site.activation = gate;
    site.next_reads = shared;
    site.image = (pair_.is_image() && !pair_.is_flat()) || pair_.norm == PairNorm::group;
    site.width = width_;
    const int64_t statistics = pair_.norm == PairNorm::batch   ? channels_
                               : pair_.norm == PairNorm::group ? sizes_[0] * kPairGroups
                                                               : values_ / width_;
    site.count = values_ / statistics;
    const bool of_rows = reads_producer(method_) || !site.image;
    const std::vector<Keep> keeps = keeps_of(method_, site);
    add(keeps, of_rows ? rows(width_) : sizes_, of_rows ? rows(width_) : sizes_, statistics);
    return find(keeps, Kind::shared) != nullptr;
  }

  /// An activation by itself; likewise.
  bool add_gate(Activation gate) {
    Site site;
    site.activation = gate;
    site.next_reads = false;
    site.image = pair_.is_image();
    site.width = channels_;
    const std::vector<Keep> keeps = keeps_of(method_, site);
    const bool coded = std::ranges::any_of(keeps, [](const Keep& k) { return k.of == Of::output; });  // a mask beside it is of its rows
    add(keeps, rows(channels_), coded ? rows(channels_) : sizes_, 0);
    return find(keeps, Kind::shared) != nullptr;
  }

  void add(const std::vector<Keep>& keeps, const std::vector<int64_t>& coded, const std::vector<int64_t>& masked, int64_t statistics) {
    for (const Keep& keep : keeps) lines_.push_back(kept_line("layer", keep, {coded, masked, statistics}));
  }

  const Pair& pair_;
  const std::vector<int64_t> sizes_;
  const Method& method_;
  int64_t values_ = 0, channels_ = 0, width_ = 0;
  std::vector<SavedTensor> lines_;
};

}  // namespace

std::string name_of(const Pair& p) {
  std::string name = (p.fused ? "fused_" : "") + std::string(kNormNames[static_cast<size_t>(p.norm)]);
  name += std::string("_") + kActivationNames[static_cast<size_t>(p.activation)] + "_" + kLayoutNames[static_cast<size_t>(p.layout)];
  return p.dropout > 0 ? name + "_dropout" : name;
}

std::span<const Pair> all_pairs() {
  static const std::vector<Pair> kPairs = [] {
    std::vector<Pair> pairs;
    for (const PairNorm norm : kPairNorms) {
      for (const PairActivation activation : kPairActivations) {
        for (const PairLayout layout : {PairLayout::rows, PairLayout::nchw, PairLayout::channels_last}) {
          for (const double dropout : {0.0, 0.5}) {
            const Pair pair{norm, activation, layout, dropout};
            pairs.push_back(pair);
            if (has_norm_act(pair)) pairs.push_back({norm, activation, layout, dropout, /*fused=*/true});
          }
        }
      }
    }
    return pairs;
  }();
  return kPairs;
}

std::vector<int64_t> weight_sizes(const Pair& pair, at::IntArrayRef x) {
  return pair.is_flat() ? x.slice(1).vec() : std::vector<int64_t>{x[1]};
}

at::Tensor our_pair(const Pair& p, const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, const SavePolicy& s) {
  if (p.fused) return fused_pair(p, x, gamma, beta, s);
  const at::Tensor z = our_activation(p.activation, our_norm(p, x, gamma, beta, s), s);
  const std::unique_ptr<SeedBank> masks = masks_of(p);
  return dropout(z, p.dropout, true, s);
}

at::Tensor torch_pair(const Pair& p, const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta) {
  const at::Tensor z = torch_activation_of(p.activation, torch_norm_of(p, x, gamma, beta));
  if (p.dropout == 0) return z;
  const at::Tensor factors = dropout_factors(mask_seeds().narrow(0, 0, 1), {z.numel() / z.size(1), z.size(1)}, p.dropout);
  return z * (p.is_image() ? image_of_rows(factors, z.sizes()) : factors);
}

GradientCase pair_case(const Pair& p) {
  GradientCase c{at::kCPU, name_of(p), {}, {}, {}, {}, {}};
  c.inputs = [p] {
    at::manual_seed(17);
    const std::vector<int64_t>& sizes = p.is_image() ? kImageSizes : kRowSizes;
    const std::vector<int64_t> weights = weight_sizes(p, sizes);
    Inputs in{at::randn(sizes) + 0.2, at::randn(weights) + 0.3, at::randn(weights)};
    in[1].view(-1)[1] = 0;  // a channel that is all on or all off
    if (p.layout == PairLayout::channels_last) in[0] = in[0].contiguous(at::MemoryFormat::ChannelsLast);
    in.push_back(p.is_image() ? at::randn({5, sizes[1], 3, 3}) : at::randn({8, sizes[1]}));
    for (at::Tensor& t : in) t.requires_grad_();
    return in;
  };
  c.ours = [p](const Inputs& in, const SavePolicy& s) {
    const at::Tensor z = our_pair(p, in[0], in[1], in[2], s);
    return p.is_image() ? conv(z, in[3], {}, padded(), s) : linear(z, in[3], {}, s);
  };
  c.torchs = [p](const Inputs& in, const at::Tensor&) {
    const at::Tensor z = torch_pair(p, in[0], in[1], in[2]);
    return p.is_image() ? at::conv2d(z, in[3], {}, 1, 1) : at::linear(z, in[3]);
  };
  return c;
}

std::vector<SavedTensor> planned_lines(const Pair& pair, at::IntArrayRef x, const Method& method) {
  return PlannedLines(pair, x, method).make();
}

}  // namespace satchel::test
