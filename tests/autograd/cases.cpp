// How to call each function of the autograd and graph rooms, and what torch would do.
#include <map>
#include <memory>
#include <ostream>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/graph/gcn.h"
#include "satchel/graph/sage.h"
#include "satchel/graph/spmm.h"
#include "satchel/tensor/pack.h"
#include "tests/autograd/gradient.h"

namespace satchel::test {
namespace {

const std::vector<std::string> kKeep{"satchel,bits=32", "exact,bits=32,project=none", "fp32"};
const std::vector<std::string> kPacked{"satchel", "exact", "blockwise", "bits=4,block=64", "satchel,side=both", "satchel,bits=3"};

/// Of rows, with every method, those of images too; of sequences with those that treat samples apart.
GradientCase linear_case(at::Device device, const std::string& name, const std::vector<int64_t>& x) {
  GradientCase c{device,
                 name,
                 fixed(device,
                       [x] {
                         return Inputs{values_around(x), values_around({24, 32}), values_around({24})};
                       }),
                 [](const Inputs& in, const SavePolicy& s) { return linear(in[0], in[1], in[2], s); },
                 [](const Inputs& in, const at::Tensor&) { return at::linear(in[0], in[1], in[2]); },
                 kKeep,
                 {"satchel", "actnn", "division", "exact"},
                 {}};
  if (x.size() > 2) return c;
  c.noisy_methods = kPacked;
  c.noisy_methods.insert(c.noisy_methods.end(), {"gact", "division", "actnn", "actnn,level=1", "actnn,level=2", "actnn,level=4"});
  return c;
}

GradientCase activation_case(at::Device device, const std::string& name,
                             std::function<at::Tensor(const at::Tensor&, const SavePolicy&)> ours,
                             std::function<at::Tensor(const at::Tensor&)> torchs) {
  return {device,
          name,
          fixed(device,
                [] {
                  return Inputs{values_around({30, 17})};
                }),
          [ours](const Inputs& in, const SavePolicy& s) { return ours(in[0], s); },
          [torchs](const Inputs& in, const at::Tensor&) { return torchs(in[0]); },
          kKeep,
          {"satchel", "exact"},
          {}};
}

GradientCase dropout_case(at::Device device) {
  return {device,
          "dropout",
          fixed(device,
                [] {
                  return Inputs{values_around({30, 17})};
                }),
          [](const Inputs& in, const SavePolicy& s) { return dropout(in[0], 0.3, true, s); },
          [](const Inputs& in, const at::Tensor& seed) {
            return in[0] * dropout_factors(seed, {30, 17}, 0.3);
          },
          {"satchel,bits=32", "exact,bits=32,project=none"},  // fp32 is torch's own draw
          {"satchel", "exact"},
          {}};
}

at::Tensor torch_norm(const Inputs& in, Norm norm) {
  if (norm == Norm::none) return in[0];
  if (norm == Norm::layer) return at::layer_norm(in[0], {in[0].size(1)}, in[1], in[2]);
  return at::batch_norm(in[0], in[1], in[2], {}, {}, /*training=*/true, 0.1, 1e-5, false);
}

/// Variance of normalised values as they come back, which `coded` gives for a seed. They must be right on average: what is expected of a
/// gradient holds the exact values, never the code's own mean.
at::Tensor variance_of(const at::Tensor& exact, const std::function<at::Tensor(uint64_t)>& coded) {
  constexpr int kDraws = 400;
  at::Tensor variance = at::zeros_like(exact);
  for (int s = 0; s < kDraws; ++s) variance += (coded(static_cast<uint64_t>(s) + 1).to(at::kDouble) - exact).square() / kDraws;
  return variance;
}

/// How normalised values `exact` of x come back: from the shared save, from the norm's own, or from its packed input.
std::function<at::Tensor(uint64_t)> coder_of(const at::Tensor& x, const at::Tensor& exact, const at::Tensor& mean, const at::Tensor& rstd,
                                             const Inputs& in, const Method& method, Norm norm, Activation activation) {
  const bool own = !method.shared || activation == Activation::elu;
  const int64_t count = x.size(norm == Norm::batch ? 0 : 1);
  const CodecSpec spec = own ? norm_spec(method, x.size(1), count) : shared_spec(method, norm, activation, x.size(1), count);
  const at::Tensor input = x.to(at::kFloat), values = exact.to(at::kFloat), m = mean.to(at::kFloat), r = rstd.to(at::kFloat);
  const at::Tensor gamma = in[1].detach(), beta = in[2].detach();
  const bool shared = method.shared;
  return [=](uint64_t seed) {
    if (!shared) return (unpack(pack(input, spec, seed)) - m) * r;
    if (spec.side == Side::none) return unpack(pack(values, spec, seed));
    return unpack(pack_side(values, spec, seed_tensor(seed, gamma.device()), gamma, beta));
  };
}

/// The expected gradient of x for g, that of γ·x̂ + β: x̂_i·Σ g·x̂ gains g_i·v_i, less what is made up for.
at::Tensor expected_norm_gradient(const at::Tensor& g, const at::Tensor& gamma, const at::Tensor& exact, const at::Tensor& rstd, Norm norm,
                                  const at::Tensor& variance) {
  if (norm == Norm::batch) {
    const double n = static_cast<double>(g.size(0));
    return gamma * rstd * (g - g.mean(0) - exact * (g * exact).mean(0) - g * variance / n);
  }
  const double n = static_cast<double>(g.size(1));
  const at::Tensor gg = g * gamma;
  return rstd * (gg - gg.mean(1, true) - exact * (gg * exact).mean(1, true) - gg * variance / n);
}

struct ChainCase {
  std::string name;
  Norm norm;
  Activation activation;
  double dropout;
  int64_t rows = 72, channels = 16;
};

/// Variances depend on the method alone: drawn once each.
auto expected_of(const ChainCase& k, double slope, bool with_next) {
  const auto known = std::make_shared<std::map<std::string, at::Tensor>>();
  return [=](const Inputs& in, const at::Tensor& g, const at::Tensor& seed, const Method& method) {
    const at::Tensor x = in[0].detach().to(at::kDouble), gamma = in[1].detach().to(at::kDouble), beta = in[2].detach().to(at::kDouble);
    const auto [var, mean] = at::var_mean(x, at::IntArrayRef{k.norm == Norm::batch ? 0 : 1}, 0, true);
    const at::Tensor rstd = (var + 1e-5).rsqrt(), exact = (x - mean) * rstd;
    if (!known->contains(method.name)) {
      (*known)[method.name] = variance_of(exact, coder_of(x, exact, mean, rstd, in, method, k.norm, k.activation));
    }
    const at::Tensor y = (exact * gamma + beta).requires_grad_();
    at::Tensor z = torch_activation(y, k.activation, slope);
    if (k.dropout > 0) z = z * dropout_factors(seed, z.sizes(), k.dropout);
    const at::Tensor out = with_next ? at::linear(z, in[3].detach().to(at::kDouble)) : z;
    at::Tensor variance = known->at(method.name);
    // Rows' statistics: the mean of the variances is made up for, where codes are alike on both sides.
    const bool one_sided = shared_spec(method, k.norm, k.activation, k.channels, k.channels).side == Side::one_sided;
    const bool made_up = k.norm == Norm::layer && method.shared && (k.activation == Activation::elu || !one_sided);
    if (made_up) variance = variance - variance.mean(1, true);
    return expected_norm_gradient(gradients_of(out, g, {y})[0], gamma, exact, rstd, k.norm, variance);
  };
}

/// The chain alone, and followed by a linear layer that shares its save.
GradientCase chain_case(at::Device device, const ChainCase& k, bool with_next) {
  const double slope = k.activation == Activation::elu ? 0.7 : 0.2;
  const auto options = [k, slope](bool training) {
    NormActOptions o;
    o.norm = k.norm;
    o.activation = k.activation;
    o.slope = o.alpha = slope;
    o.dropout = k.dropout;
    o.statistics.training = training;
    return o;
  };
  GradientCase c{device, {}, {}, {}, {}, {}, {}};
  c.name = k.name + (with_next ? " + linear" : "");
  c.inputs = fixed(device, [k, with_next] {
    Inputs in{values_around({k.rows, k.channels}, 0.2), values_around({k.channels}, 0.3), values_around({k.channels})};
    in[1][1] = 0;  // a channel that is all on or all off
    if (with_next) in.push_back(values_around({8, k.channels}));
    return in;
  });
  c.ours = [options, with_next](const Inputs& in, const SavePolicy& s) {
    const at::Tensor z = norm_act(in[0], {in[1], in[2], {}, {}}, options(true), s);
    return with_next ? linear(z, in[3], {}, s) : z;
  };
  c.torchs = [k, slope, with_next](const Inputs& in, const at::Tensor& seed) {
    at::Tensor z = torch_activation(torch_norm(in, k.norm), k.activation, slope);
    if (k.dropout > 0) z = z * dropout_factors(seed, z.sizes(), k.dropout);
    return with_next ? at::linear(z, in[3]) : z;
  };
  if (k.norm != Norm::none) c.expected_first = expected_of(k, slope, with_next);
  // Methods that go layer by layer draw dropout's seed after the norm's: only the shared ones redraw it here.
  c.exact_methods = {"satchel,bits=32"};
  c.noisy_methods = {"satchel", "satchel,norm_bias=0", "satchel,side=both", "satchel,bits=3", "satchel,side=none", "gact"};
  if (k.dropout == 0) c.exact_methods.insert(c.exact_methods.end(), {"exact,bits=32,project=none", "fp32"});
  if (k.dropout == 0) c.noisy_methods.insert(c.noisy_methods.end(), {"exact", "blockwise"});
  return c;
}

Adjacency ring(at::Device device, bool gcn) {
  std::vector<int64_t> from, to;
  for (int64_t i = 0; i < 48; ++i) {
    for (const int64_t step : {1, 5, 11}) {
      from.push_back(i);
      to.push_back((i + step * (1 + i % 3)) % 48);
    }
  }
  const Csr a = csr_from_coo(at::tensor(from), at::tensor(to), 48, 48);
  return to_device(gcn ? gcn_adjacency(a) : mean_adjacency(a), device);
}

at::Tensor dense(const Csr& a) { return multiply(a, at::eye(a.columns, a.device())).to(at::kDouble); }

GradientCase sage_case(at::Device device, int64_t in, int64_t out) {
  const Adjacency a = ring(device, false);
  return {device,
          "sage " + std::to_string(in) + " to " + std::to_string(out),
          fixed(device,
                [in, out] {
                  return Inputs{values_around({48, in}), values_around({out, in}), values_around({out, in}), values_around({out})};
                }),
          [a](const Inputs& v, const SavePolicy& s) {
            return sage(v[0], a, {v[1], v[2], v[3]}, s);
          },
          [a](const Inputs& v, const at::Tensor&) { return at::linear(dense(a.matrix).matmul(v[0]), v[1], v[3]) + at::linear(v[0], v[2]); },
          kKeep,
          kPacked,
          {}};
}

GradientCase gcn_case(at::Device device, int64_t in, int64_t out) {
  const Adjacency a = ring(device, true);
  return {device,
          "gcn " + std::to_string(in) + " to " + std::to_string(out),
          fixed(device,
                [in, out] {
                  return Inputs{values_around({48, in}), values_around({out, in}), values_around({out})};
                }),
          [a](const Inputs& v, const SavePolicy& s) { return gcn(v[0], a, v[1], v[2], s); },
          [a](const Inputs& v, const at::Tensor&) { return dense(a.matrix).matmul(at::linear(v[0], v[1])) + v[2]; },
          kKeep,
          kPacked,
          {}};
}

GradientCase spmm_case(at::Device device) {
  const Adjacency a = ring(device, false);
  return {device,
          "spmm",
          fixed(device,
                [] {
                  return Inputs{values_around({48, 20})};
                }),
          [a](const Inputs& v, const SavePolicy&) { return spmm(a, v[0]); },
          [a](const Inputs& v, const at::Tensor&) { return dense(a.matrix).matmul(v[0]); },
          {"satchel"},
          {"satchel"},
          {}};
}

}  // namespace

std::vector<GradientCase> autograd_cases(at::Device device) {
  std::vector<GradientCase> cases{
      linear_case(device, "linear", {40, 32}),
      linear_case(device, "linear of sequences", {5, 8, 32}),
      activation_case(
          device, "relu", [](const at::Tensor& x, const SavePolicy& s) { return relu(x, s); },
          [](const at::Tensor& x) { return at::relu(x); }),
      activation_case(
          device, "leaky_relu", [](const at::Tensor& x, const SavePolicy& s) { return leaky_relu(x, 0.1, s); },
          [](const at::Tensor& x) { return at::leaky_relu(x, 0.1); }),
      activation_case(
          device, "elu", [](const at::Tensor& x, const SavePolicy& s) { return elu(x, 0.8, s); },
          [](const at::Tensor& x) { return at::elu(x, 0.8); }),
      dropout_case(device),
      sage_case(device, 32, 12),
      sage_case(device, 12, 32),
      gcn_case(device, 32, 12),
      gcn_case(device, 12, 32),
      spmm_case(device),
  };
  for (const ChainCase& k : {ChainCase{"batch relu", Norm::batch, Activation::relu, 0},
                             {"batch relu, odd", Norm::batch, Activation::relu, 0.4, 50, 13},
                             {"batch relu dropout", Norm::batch, Activation::relu, 0.4},
                             {"layer relu dropout", Norm::layer, Activation::relu, 0.4},
                             {"batch leaky", Norm::batch, Activation::leaky_relu, 0.25},
                             {"batch elu", Norm::batch, Activation::elu, 0},
                             {"batch", Norm::batch, Activation::none, 0.25},
                             {"layer", Norm::layer, Activation::none, 0},
                             {"relu dropout", Norm::none, Activation::relu, 0.4},
                             {"leaky dropout", Norm::none, Activation::leaky_relu, 0.4},
                             {"elu dropout", Norm::none, Activation::elu, 0.4}}) {
    for (const bool with_next : {false, true}) cases.push_back(chain_case(device, k, with_next));
  }
  return cases;
}

void PrintTo(const CaseMethod& p, std::ostream* out) { *out << p.name; }

namespace {

std::vector<CaseMethod> with_methods(std::vector<std::string> GradientCase::*methods) {
  static const std::vector<GradientCase> kCases = all_cases();
  std::vector<CaseMethod> all;
  for (const GradientCase& c : kCases) {
    for (const std::string& method : c.*methods) all.push_back({c.name + " " + method, c, method});
  }
  return all;
}

}  // namespace

std::vector<CaseMethod> with_exact_methods() { return with_methods(&GradientCase::exact_methods); }
std::vector<CaseMethod> with_noisy_methods() { return with_methods(&GradientCase::noisy_methods); }

std::vector<GradientCase> all_cases(at::Device device) {
  std::vector<GradientCase> cases = autograd_cases(device);
  for (const auto& more : {conv_cases(device), map_cases(device)}) cases.insert(cases.end(), more.begin(), more.end());
  return cases;
}

}  // namespace satchel::test
