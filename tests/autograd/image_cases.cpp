// How to call norms, activations and dropout on maps, and what torch would do.
#include <map>
#include <memory>
#include <utility>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/gate.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/report.h"
#include "satchel/autograd/saved.h"
#include "satchel/autograd/smooth.h"
#include "satchel/tensor/pack.h"
#include "tests/autograd/gradient.h"
#include "tests/keep_support.h"

namespace satchel::test {
namespace {

const std::vector<std::string> kKeep{"satchel,bits=32", "exact,bits=32,project=none", "fp32"};
const std::vector<std::string> kShared{
    "satchel", "satchel,norm_bias=0", "satchel,side=both", "satchel,bits=3", "satchel,side=none", "satchel,residual=1", "gact"};
const std::vector<std::string> kByLayer{"actnn", "actnn,adaptive=no", "actnn,level=2", "actnn,level=4", "division", "exact", "blockwise"};

const std::vector<std::string> kFew{"satchel", "satchel,residual=1", "actnn", "actnn,adaptive=no", "division"};

std::vector<std::string> both() {
  std::vector<std::string> all = kShared;
  all.insert(all.end(), kByLayer.begin(), kByLayer.end());
  return all;
}

/// Which norm, what comes before and after it.
struct MapCase {
  std::string name;
  std::vector<int64_t> sizes = {6, 8, 5, 3};
  int64_t groups = 0;  // 0: BatchNorm
  Activation activation = Activation::relu;
  bool in_parts = false;  // norm and activation as functions of their own
  bool skip = false;      // a residual sum
  bool with_next = false;
  bool channels_last = false;
  double dropout = 0;
  bool few = false;  // methods: another shape of what has been tried with all
};

constexpr double kSlope = 0.2;

/// What is normalised together: channels over samples and pixels, or a group of channels of one sample.
at::Tensor in_groups(const at::Tensor& x, int64_t groups) {
  if (groups == 0) return x.transpose(0, 1).reshape({x.size(1), -1});
  return x.reshape({x.size(0) * groups, -1});
}
at::Tensor out_of_groups(const at::Tensor& x, at::IntArrayRef sizes, int64_t groups) {
  if (groups > 0) return x.reshape(sizes);
  std::vector<int64_t> offloaded = sizes.vec();
  std::swap(offloaded[0], offloaded[1]);
  return x.reshape(offloaded).transpose(0, 1);
}

at::Tensor by_channel(const at::Tensor& w, const at::Tensor& x) {
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
  shape[1] = w.numel();
  return w.view(shape);
}

/// Mean over what is normalised together, where it belongs.
at::Tensor group_mean(const at::Tensor& x, int64_t groups) {
  const at::Tensor lines = in_groups(x, groups);
  return out_of_groups(lines.mean(1, true).expand_as(lines), x.sizes(), groups);
}

struct Normalised {
  at::Tensor values, mean, rstd;
  Normalised(const at::Tensor& x, int64_t groups) : mean(group_mean(x, groups)) {
    rstd = (group_mean((x - mean).square(), groups) + 1e-5).rsqrt();
    values = (x - mean) * rstd;
  }
};

/// Everything after the normalised values, γ·x̂ + β coming in: in torch's functions.
at::Tensor rest_of(const MapCase& k, const at::Tensor& y, const Inputs& in, const at::Tensor& seed) {
  at::Tensor z = torch_activation(k.skip ? y + in[3] : y, k.activation, kSlope);
  if (k.dropout > 0) {
    const int64_t rows = z.numel() / z.size(1);
    z = z * image_of_rows(dropout_factors(seed, {rows, z.size(1)}, k.dropout), z.sizes());
  }
  return k.with_next ? at::conv2d(z, in[3], {}, 1, 1) : z;
}

/// How normalised values come back for a seed: from the shared save, from the norm's own, or (low-pass) from its packed input.
std::function<at::Tensor(uint64_t)> coder_of(const MapCase& k, const at::Tensor& x, const Normalised& exact, const Inputs& in,
                                             const Method& method) {
  const int64_t channels = x.size(1);
  const auto sizes = x.sizes().vec();
  const int64_t count = in_groups(x, k.groups).size(1);
  const bool shares = method.shared && !k.skip && (k.activation == Activation::relu || k.activation == Activation::leaky_relu);
  const at::Tensor input = image_of_rows(rows_of_image(x.to(at::kFloat)), sizes), values = rows_of_image(exact.values.to(at::kFloat));
  const at::Tensor gamma = in[1].detach(), beta = in[2].detach(), mean = exact.mean, rstd = exact.rstd;
  return [=](uint64_t seed) -> at::Tensor {
    if (!method.shared) {
      at::manual_seed(seed);
      const bool coded = codes_normalised(method.norm);
      const at::Tensor map = coded ? image_of_rows(values, sizes) : input;
      const at::Tensor back = method.adaptive ? Saved(map, {method, "layer"}, norm_keep(method, channels)).restore()
                                              : unpack(pack(map, norm_spec(method, channels, 0), seed));
      return coded ? back.to(at::kDouble) : (back.to(at::kDouble) - mean) * rstd;
    }
    const CodecSpec spec = shares ? shared_spec(method, k.groups > 0 ? Norm::layer : Norm::batch, k.activation, channels, count)
                                  : norm_spec(method, channels, count);
    const bool side = spec.side != Side::none;
    const at::Tensor back =
        unpack(side ? pack_side(values, spec, seed_tensor(seed, gamma.device()), gamma, beta) : pack(values, spec, seed));
    return image_of_rows(back, sizes).to(at::kDouble);
  };
}

/// Variance of normalised values as they come back. They must be right on average.
at::Tensor variance_of(const at::Tensor& exact, const std::function<at::Tensor(uint64_t)>& coded) {
  constexpr int kDraws = 400;
  at::Tensor variance = at::zeros_like(exact);
  for (int s = 0; s < kDraws; ++s) variance += (coded(static_cast<uint64_t>(s) + 1) - exact).square() / kDraws;
  return variance;
}

/// docs/theory.md 8: x̂_i·Σ g·x̂ gains g_i·v_i.
auto expected_of(const MapCase& k) {
  const auto known = std::make_shared<std::map<std::string, at::Tensor>>();
  return [=](const Inputs& in, const at::Tensor& g, const at::Tensor& seed, const Method& method) {
    Inputs d;
    for (const at::Tensor& t : in) d.push_back(t.detach().to(at::kDouble));
    const Normalised exact(d[0], k.groups);
    if (!known->contains(method.name)) (*known)[method.name] = variance_of(exact.values, coder_of(k, d[0], exact, in, method));
    at::Tensor variance = known->at(method.name);
    // Groups' statistics: the mean of the variances is made up for, where codes are alike on both sides.
    const bool one_sided =
        shared_spec(method, Norm::layer, k.activation, d[0].size(1), in_groups(d[0], k.groups).size(1)).side == Side::one_sided;
    if (k.groups > 0 && method.shared && !one_sided) variance = variance - group_mean(variance, k.groups);
    const at::Tensor gamma = by_channel(d[1], d[0]), y = (exact.values * gamma + by_channel(d[2], d[0])).requires_grad_();
    const at::Tensor gy = gradients_of(rest_of(k, y, d, seed), g, {y})[0] * gamma;
    const double n = static_cast<double>(in_groups(d[0], k.groups).size(1));
    const auto mean = [&](const at::Tensor& t) { return group_mean(t, k.groups); };
    return exact.rstd * (gy - mean(gy) - exact.values * mean(gy * exact.values) - gy * variance / n);
  };
}

at::Tensor our_parts(const MapCase& k, const Inputs& in, const SavePolicy& s) {
  const NormWeights weights{in[1], in[2], {}, {}};
  const at::Tensor y = k.groups > 0 ? group_norm(in[0], k.groups, weights, {}, s) : batch_norm(in[0], weights, {}, s);
  at::Tensor z = y;
  if (k.skip) z = y + in[3];
  if (k.activation == Activation::relu) z = relu(z, s);
  if (k.activation == Activation::leaky_relu) z = leaky_relu(z, kSlope, s);
  if (k.activation == Activation::none) saved_tensors(y);  // no reader will come: it packs now
  return z;
}

at::Tensor our_map(const MapCase& k, const Inputs& in, const SavePolicy& s) {
  NormActOptions options;
  options.activation = k.activation;
  options.slope = options.alpha = kSlope;
  options.dropout = k.dropout;
  const NormWeights weights{in[1], in[2], {}, {}};
  if (k.skip) return norm_add_act(in[0], weights, in[3], options, s);
  return norm_act(in[0], weights, options, s);
}

GradientCase map_case(at::Device device, const MapCase& k) {
  GradientCase c{device, {}, {}, {}, {}, {}, {}};
  c.name = "map: " + k.name;
  c.inputs = fixed(device, [k] {
    const int64_t channels = k.sizes[1];
    Inputs in{values_around(k.sizes, 0.2), values_around({channels}, 0.3), values_around({channels})};
    in[1][1] = 0;  // a channel that is all on or all off
    if (k.channels_last) in[0] = image_of_rows(rows_of_image(in[0]), k.sizes);
    if (k.skip) in.push_back(values_around(k.sizes));
    if (k.with_next) in.push_back(values_around({5, channels, 3, 3}));
    return in;
  });
  c.ours = [k](const Inputs& in, const SavePolicy& s) {
    const at::Tensor z = k.in_parts ? our_parts(k, in, s) : our_map(k, in, s);
    return k.with_next ? conv(z, in[3], {}, {{1}, {1}, {1}, {0}, false, 1}, s) : z;
  };
  c.torchs = [k](const Inputs& in, const at::Tensor& seed) {
    const at::Tensor y = k.groups > 0 ? at::group_norm(in[0], k.groups, in[1], in[2])
                                      : at::batch_norm(in[0], in[1], in[2], {}, {}, /*training=*/true, 0.1, 1e-5, false);
    return rest_of(k, y, in, seed);
  };
  c.expected_first = expected_of(k);
  c.exact_methods = {"satchel,bits=32"};
  c.noisy_methods = kShared;
  // Methods that go layer by layer draw dropout's seed after the norm's: only the shared ones redraw it here.
  if (k.dropout == 0) c.exact_methods = kKeep;
  if (k.dropout == 0) c.noisy_methods = k.few ? kFew : both();
  return c;
}

/// A function of single values, of a channels_last map or of a sequence.
GradientCase value_case(at::Device device, const std::string& name, std::function<at::Tensor(const at::Tensor&, const SavePolicy&)> ours,
                        std::function<at::Tensor(const at::Tensor&)> torchs) {
  return {device,
          "map: " + name,
          fixed(device,
                [] {
                  return Inputs{values_around({3, 6, 5, 3}).contiguous(at::MemoryFormat::ChannelsLast)};
                }),
          [ours](const Inputs& in, const SavePolicy& s) { return ours(in[0], s); },
          [torchs](const Inputs& in, const at::Tensor&) { return torchs(in[0]); },
          kKeep,
          {"satchel", "bits=8", "actnn", "division", "exact"},
          {}};
}

GradientCase layer_case(at::Device device, std::vector<int64_t> shape, bool affine) {
  return {device,
          "layer_norm over " + std::to_string(shape.size()) + (affine ? "" : ", plain"),
          fixed(device,
                [shape, affine] {
                  Inputs in{values_around({4, 7, 6, 5})};
                  if (affine) in.insert(in.end(), {values_around(shape, 1), values_around(shape)});
                  return in;
                }),
          [shape, affine](const Inputs& in, const SavePolicy& s) {
            const at::Tensor y = layer_norm(in[0], shape, affine ? NormWeights{in[1], in[2], {}, {}} : NormWeights{}, {}, s);
            saved_tensors(y);  // no reader will come: it packs now
            return y;
          },
          [shape, affine](const Inputs& in, const at::Tensor&) {
            return affine ? at::layer_norm(in[0], shape, in[1], in[2]) : at::layer_norm(in[0], shape);
          },
          kKeep,
          {},
          {}};
}

void add_value_cases(std::vector<GradientCase>& cases, at::Device device) {
  const auto add = [&](const char* name, auto ours, auto torchs) { cases.push_back(value_case(device, name, ours, torchs)); };
  using T = const at::Tensor&;
  add(
      "relu", [](T x, const SavePolicy& s) { return relu(x, s); }, [](T x) { return at::relu(x); });
  add(
      "leaky_relu", [](T x, const SavePolicy& s) { return leaky_relu(x, 0.1, s); }, [](T x) { return at::leaky_relu(x, 0.1); });
  add(  // wide enough that some stand beyond 6
      "relu6", [](T x, const SavePolicy& s) { return relu6(x * 5, s); }, [](T x) { return at::hardtanh(x * 5, 0, 6); });
  add(
      "elu", [](T x, const SavePolicy& s) { return elu(x, 0.8, s); }, [](T x) { return at::elu(x, 0.8); });
  add(
      "gelu", [](T x, const SavePolicy& s) { return gelu(x, "none", s); }, [](T x) { return at::gelu(x); });
  add(
      "gelu tanh", [](T x, const SavePolicy& s) { return gelu(x, "tanh", s); }, [](T x) { return at::gelu(x, "tanh"); });
  add(
      "silu", [](T x, const SavePolicy& s) { return silu(x, s); }, [](T x) { return at::silu(x); });
  add(
      "sigmoid", [](T x, const SavePolicy& s) { return satchel::sigmoid(x, s); }, [](T x) { return at::sigmoid(x); });
  add(
      "tanh", [](T x, const SavePolicy& s) { return satchel::tanh(x, s); }, [](T x) { return at::tanh(x); });
  GradientCase dropped = value_case(device, "dropout", [](T x, const SavePolicy& s) { return dropout(x, 0.3, true, s); }, {});
  dropped.torchs = [](const Inputs& in, const at::Tensor& seed) {
    return in[0] * image_of_rows(dropout_factors(seed, {45, 6}, 0.3), in[0].sizes());
  };
  std::erase(dropped.exact_methods, "fp32");  // torch's own draw
  cases.push_back(dropped);
  GradientCase skipped = value_case(device, "drop_samples", [](T x, const SavePolicy& s) { return drop_samples(x, 0.4, true, s); }, {});
  skipped.torchs = [](const Inputs& in, const at::Tensor& seed) {
    return in[0] * dropout_factors(seed, {in[0].size(0), 1}, 0.4).view({-1, 1, 1, 1});
  };
  std::erase(skipped.exact_methods, "fp32");
  cases.push_back(skipped);
}

/// A convolution that may rebuild its input from what the gate keeps.
GradientCase gated_conv_case(at::Device device) {
  return {device,
          "gate + conv",
          fixed(device,
                [] {
                  return Inputs{values_around({6, 8, 5, 3}), values_around({6, 8, 1, 1}, 0.5), values_around({4, 8, 3, 3})};
                }),
          [](const Inputs& in, const SavePolicy& s) {
            return conv(gate(in[0], in[1].to(in[0].scalar_type()), s), in[2], {}, {{1}, {1}}, s);
          },
          [](const Inputs& in, const at::Tensor&) { return at::conv2d(in[0] * in[1], in[2], {}, 1, 1); },
          kKeep,
          both(),
          {}};
}

/// Both factors want gradients.
GradientCase gate_case(at::Device device, const std::string& name, bool channels_last, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> scale(sizes.size(), 1);
  scale[0] = sizes[0];
  scale[1] = sizes[1];
  const auto inputs = [=] {
    at::Tensor x = values_around(sizes);
    if (channels_last) x = x.contiguous(at::MemoryFormat::ChannelsLast);
    return Inputs{x, values_around(scale, 0.5)};
  };
  return {device,
          name,
          fixed(device, inputs),
          [](const Inputs& in, const SavePolicy& s) { return gate(in[0], in[1].to(in[0].scalar_type()), s); },
          [](const Inputs& in, const at::Tensor&) { return in[0] * in[1]; },
          kKeep,
          both(),
          {}};
}

}  // namespace

std::vector<GradientCase> map_cases(at::Device device) {
  std::vector<GradientCase> cases;
  MapCase relus{"batch relu"}, next{"batch relu + conv"}, dropped{"batch relu dropout + conv"}, residual{"batch + skip relu"};
  next.with_next = dropped.with_next = residual.skip = true;
  next.channels_last = true;
  dropped.dropout = 0.4;
  MapCase parts = next, apart = residual, flat = relus, volume = relus, leaky = relus, none = relus, elus = relus, group = relus;
  parts.name = "batch, relu, conv";
  apart.name = "batch, +, relu";
  parts.in_parts = apart.in_parts = none.in_parts = group.in_parts = true;
  flat = {"batch relu, 3-D", {9, 5, 7}};
  volume = {"batch relu, 5-D", {2, 6, 3, 4, 3}};
  leaky.name = "batch leaky";
  leaky.activation = Activation::leaky_relu;
  none.name = "batch alone";
  none.activation = Activation::none;
  elus.name = "batch elu";
  elus.activation = Activation::elu;
  group.name = "group relu";
  group.groups = 4;
  MapCase groups = group;
  groups.name = "group alone";
  groups.activation = Activation::none;
  flat.few = volume.few = elus.few = groups.few = apart.few = true;
  // Samples of whole blocks of 256 values: the fused passes of a GPU.
  MapCase whole = relus, whole_sum = residual, whole_norm = none;
  whole.name += ", whole blocks";
  whole_sum.name += ", whole blocks";
  whole_norm.name += ", whole blocks";
  whole.sizes = whole_sum.sizes = whole_norm.sizes = {4, 16, 8, 4};
  whole.few = whole_sum.few = whole_norm.few = true;
  for (const MapCase& k :
       {relus, next, dropped, residual, parts, apart, flat, volume, leaky, none, elus, group, groups, whole, whole_sum, whole_norm}) {
    cases.push_back(map_case(device, k));
  }
  cases.push_back(gated_conv_case(device));
  cases.push_back(gate_case(device, "gate", false, {6, 8, 5, 3}));
  cases.push_back(gate_case(device, "gate of channels_last, whole blocks", true, {4, 16, 8, 4}));
  cases.push_back(layer_case(device, {5}, true));
  cases.push_back(layer_case(device, {6, 5}, true));
  cases.push_back(layer_case(device, {5}, false));
  add_value_cases(cases, device);
  return cases;
}

}  // namespace satchel::test
