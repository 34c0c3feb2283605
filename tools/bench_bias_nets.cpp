#include "tools/bench_bias_nets.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>

#include "satchel/core/error.h"

namespace satchel::tool {
namespace {

constexpr int64_t kIn = 32, kHidden = 64, kClasses = 10, kChannels = 16, kSide = 8;

using F = NetFunctions;
using W = NetWeights;
using D = const NetData&;

at::Tensor first(F& f, W& w, D d, int64_t width = kHidden) { return f.linear(d.x, w.matrix("first", width, kIn), {}); }
at::Tensor last(F& f, W& w, const at::Tensor& x) {
  return f.linear(x, w.matrix("last", kClasses, x.size(1)), w.bias("last.bias", kClasses));
}
at::Tensor inner(F& f, W& w, const at::Tensor& x, const std::string& name) { return f.linear(x, w.matrix(name, kHidden, kHidden), {}); }
at::Tensor biased(F& f, W& w, const at::Tensor& x, const std::string& name) {
  return f.linear(x, w.matrix(name, kHidden, x.size(1)), w.bias(name + ".bias", kHidden));
}
/// The mean over pixels, then the last layer.
at::Tensor head(F& f, W& w, const at::Tensor& x) { return last(f, w, x.mean(at::IntArrayRef{2, 3})); }

at::Tensor batch(F& f, W& w, D d) { return last(f, w, f.relu(f.batch_norm(first(f, w, d), w.norm("norm", kHidden)))); }

at::Tensor batch_narrow(F& f, W& w, D d) { return last(f, w, f.relu(f.batch_norm(first(f, w, d, 32), w.norm("norm", 32)))); }

at::Tensor batch_dropout(F& f, W& w, D d) {
  const at::Tensor h = f.dropout(f.relu(f.batch_norm(first(f, w, d), w.norm("norm1", kHidden))), 0.3);
  return last(f, w, f.dropout(f.relu(f.batch_norm(inner(f, w, h, "second"), w.norm("norm2", kHidden))), 0.3));
}

at::Tensor batch_deep(F& f, W& w, D d) {
  at::Tensor h = first(f, w, d);
  for (const char* at : {"1", "2", "3"}) {
    h = inner(f, w, f.relu(f.batch_norm(h, w.norm(std::string("norm") + at, kHidden))), std::string("after") + at);
  }
  return last(f, w, f.relu(f.batch_norm(h, w.norm("norm4", kHidden))));
}

at::Tensor fused(F& f, W& w, D d) {
  const at::Tensor h = f.norm_act(first(f, w, d), w.norm("norm1", kHidden), Norm::batch, 0.5);
  return last(f, w, f.norm_act(inner(f, w, h, "second"), w.norm("norm2", kHidden), Norm::batch, 0.5));
}

at::Tensor leaky(F& f, W& w, D d) {
  return last(f, w, f.dropout(f.leaky_relu(f.batch_norm(first(f, w, d), w.norm("norm", kHidden))), 0.2));
}

at::Tensor elu(F& f, W& w, D d) { return last(f, w, f.dropout(f.elu(f.batch_norm(first(f, w, d), w.norm("norm", kHidden))), 0.2)); }

at::Tensor layer(F& f, W& w, D d) {
  const at::Tensor h = f.relu(f.layer_norm(biased(f, w, d.x, "first"), w.norm("norm1", kHidden)));
  return last(f, w, f.relu(f.layer_norm(biased(f, w, h, "second"), w.norm("norm2", kHidden))));
}

/// As in a transformer: x + W2·dropout(gelu(W1·norm(x))).
at::Tensor layer_gelu(F& f, W& w, D d) {
  const at::Tensor h = biased(f, w, d.x, "embed");
  const at::Tensor up = f.gelu(biased(f, w, f.layer_norm(h, w.norm("norm1", kHidden)), "up"));
  const at::Tensor sum = h + biased(f, w, f.dropout(up, 0.2), "down");
  return last(f, w, f.layer_norm(sum, w.norm("norm2", kHidden)));
}

at::Tensor plain_relu(F& f, W& w, D d) {
  const at::Tensor h = f.dropout(f.relu(biased(f, w, d.x, "first")), 0.3);
  return last(f, w, f.relu(biased(f, w, h, "second")));
}

at::Tensor group(F& f, W& w, D d) {
  const at::Tensor h = f.relu(f.group_norm(f.conv(d.x, w.kernel("first", kChannels, 8), 1), 4, w.norm("norm1", kChannels)));
  return head(f, w, f.relu(f.group_norm(f.conv(h, w.kernel("second", kChannels, kChannels), 2), 4, w.norm("norm2", kChannels))));
}

at::Tensor images(F& f, W& w, D d) {
  const at::Tensor h = f.relu(f.batch_norm(f.conv(d.x, w.kernel("first", kChannels, 8), 1), w.norm("norm1", kChannels)));
  const at::Tensor g = f.conv(f.dropout(f.max_pool(h), 0.2), w.kernel("second", kChannels, kChannels), 1);
  return head(f, w, f.relu(f.batch_norm(g, w.norm("norm2", kChannels))));
}

at::Tensor residual(F& f, W& w, D d) {
  at::Tensor h = f.norm_act(f.conv(d.x, w.kernel("first", kChannels, 8), 1), w.norm("norm", kChannels), Norm::batch, 0);
  for (const std::string at : {"1", "2"}) {
    const at::Tensor a = f.norm_act(f.conv(h, w.kernel("block" + at + ".conv1", kChannels, kChannels), 1),
                                    w.norm("block" + at + ".norm1", kChannels), Norm::batch, 0);
    h = f.norm_add(f.conv(a, w.kernel("block" + at + ".conv2", kChannels, kChannels), 1), w.norm("block" + at + ".norm2", kChannels), h);
  }
  return head(f, w, h);
}

at::Tensor sage(F& f, W& w, D d) {
  const auto conv = [&](const at::Tensor& x, const std::string& name, int64_t out) {
    return f.sage(x, d.graph, w.matrix(name + ".neighbour", out, x.size(1)), w.matrix(name + ".self", out, x.size(1)));
  };
  const auto rest = [&](const at::Tensor& x, const std::string& name) {
    return f.dropout(f.norm_act(x, w.norm(name, kHidden), Norm::batch, 0), 0.5);
  };
  return conv(rest(conv(rest(conv(d.x, "conv1", kHidden), "norm1"), "conv2", kHidden), "norm2"), "conv3", kClasses);
}

at::Tensor gcn(F& f, W& w, D d) {
  const auto conv = [&](const at::Tensor& x, const std::string& name, int64_t out) {
    return f.gcn(x, d.graph, w.matrix(name, out, x.size(1)));
  };
  const at::Tensor h = f.norm_act(conv(d.x, "conv1", kHidden), w.norm("norm1", kHidden), Norm::layer, 0.3);
  return conv(f.norm_act(conv(h, "conv2", kHidden), w.norm("norm2", kHidden), Norm::batch, 0.3), "conv3", kClasses);
}

const std::vector<BiasNet>& nets() {
  using enum NetInput;
  static const std::vector<BiasNet> kNets = {
      {"batch", rows, 4096, false, batch, "linear, BatchNorm, ReLU, linear"},
      {"batch-16384", rows, 16384, false, batch_narrow, "the same with more rows and 32 channels"},
      {"batch-256", rows, 256, false, batch, "the same with few rows"},
      {"batch-dropout", rows, 2048, false, batch_dropout, "two hidden layers with BatchNorm, ReLU, dropout"},
      {"batch-deep", rows, 1024, false, batch_deep, "four hidden layers with BatchNorm, ReLU"},
      {"fused", rows, 4096, true, fused, "two hidden layers, norm_act() with dropout"},
      {"leaky", rows, 4096, false, leaky, "linear, BatchNorm, LeakyReLU, dropout, linear"},
      {"elu", rows, 2048, false, elu, "linear, BatchNorm, ELU, dropout, linear"},
      {"layer-64", rows, 512, false, layer, "two hidden layers with LayerNorm of 64 channels, ReLU"},
      {"layer-64-gelu", rows, 512, false, layer_gelu, "a transformer's MLP: LayerNorm of 64 channels, GELU, dropout, residual sum"},
      {"relu", rows, 2048, false, plain_relu, "two hidden layers with ReLU, dropout, no norm"},
      {"group", images, 64, false, group, "two convolutions with GroupNorm, ReLU"},
      {"images", images, 64, false, tool::images, "two convolutions with BatchNorm, ReLU, max-pool, dropout"},
      {"residual", images, 64, false, residual, "a residual CNN with two blocks"},
      {"sage", mean_graph, 4608, false, sage, "GraphSAGE, three layers, BatchNorm, ReLU, dropout"},
      {"gcn", gcn_graph, 1024, true, gcn, "GCN, three layers, LayerNorm and BatchNorm, ReLU, dropout"},
  };
  return kNets;
}

using NormFunction = at::Tensor (*)(F& f, W& w, const at::Tensor& x);

/// LayerNorm's and RMSNorm's weights: of channels, or of an image's channels and pixels.
NormWeights sample_weights(W& w, const at::Tensor& x) {
  const NormWeights line = w.norm("norm", x.numel() / x.size(0));
  return {line.gamma.view(x.sizes().slice(1)), line.beta.view(x.sizes().slice(1)), {}, {}};
}

constexpr std::pair<const char*, NormFunction> kNorms[] = {
    {"batch", [](F& f, W& w, const at::Tensor& x) { return f.batch_norm(x, w.norm("norm", x.size(1))); }},
    {"layer", [](F& f, W& w, const at::Tensor& x) { return f.layer_norm(x, sample_weights(w, x)); }},
    {"group", [](F& f, W& w, const at::Tensor& x) { return f.group_norm(x, 4, w.norm("norm", x.size(1))); }},
    {"rms",
     [](F& f, W& w, const at::Tensor& x) {
       const at::Tensor gamma = w.gamma("norm.gamma", x.numel() / x.size(0));
       return f.rms_norm(x, {gamma.view(x.sizes().slice(1)), {}, {}, {}});
     }},
};

using ValueFunction = at::Tensor (*)(F& f, const at::Tensor& x);
constexpr std::pair<const char*, ValueFunction> kActivations[] = {
    {"none", [](F&, const at::Tensor& x) { return x; }},
    {"relu", [](F& f, const at::Tensor& x) { return f.relu(x); }},
    {"leaky_relu", [](F& f, const at::Tensor& x) { return f.leaky_relu(x); }},
    {"elu", [](F& f, const at::Tensor& x) { return f.elu(x); }},
    {"gelu", [](F& f, const at::Tensor& x) { return f.gelu(x); }},
    {"gelu_tanh", [](F& f, const at::Tensor& x) { return f.gelu_tanh(x); }},
    {"silu", [](F& f, const at::Tensor& x) { return f.silu(x); }},
    {"tanh", [](F& f, const at::Tensor& x) { return f.tanh(x); }},
    {"sigmoid", [](F& f, const at::Tensor& x) { return f.sigmoid(x); }},
};

/// BatchNorm's rows are as many as make it sample off values (core/method.h); the others' statistics are of each row.
BiasNet pair_net(const std::string& name, NormFunction norm, ValueFunction activation, bool image, double p) {
  const auto rest = [=](F& f, W& w, const at::Tensor& x) {
    const at::Tensor z = activation(f, norm(f, w, x));
    return p > 0 ? f.dropout(z, p) : z;
  };
  BiasNet net{name, image ? NetInput::images : NetInput::rows, 64, false, {}, {}};
  if (image) {
    net.forward = [rest](F& f, W& w, D d) {
      const at::Tensor z = rest(f, w, f.conv(d.x, w.kernel("first", kChannels, 8), 1));
      return head(f, w, f.conv(z, w.kernel("second", kChannels, kChannels), 2));
    };
    return net;
  }
  net.rows = name.starts_with("batch") ? 4096 : 512;
  net.forward = [rest](F& f, W& w, D d) { return last(f, w, rest(f, w, first(f, w, d))); };
  return net;
}

at::Tensor normal(at::Generator& generator, at::IntArrayRef shape) { return at::randn(shape, generator, at::TensorOptions(at::kFloat)); }

/// Features whose channels are correlated and of very different size, as hidden layers' are.
at::Tensor rows_of(at::Generator& generator, int64_t count) {
  const at::Tensor sizes = at::logspace(0, -1.5, kIn);
  return (normal(generator, {count, kIn}) * sizes).matmul(normal(generator, {kIn, kIn})) * (3 / std::sqrt(static_cast<double>(kIn)));
}

/// Smooth images with some noise.
at::Tensor images_of(at::Generator& generator, int64_t count) {
  const at::Tensor coarse = normal(generator, {count, 8, 3, 3});
  return at::upsample_bilinear2d(coarse, {kSide, kSide}, true) + 0.3 * normal(generator, {count, 8, kSide, kSide});
}

/// Eight neighbours a node, half of them near by.
Adjacency graph_of(at::Generator& generator, int64_t nodes, bool gcn) {
  const at::Tensor from = at::arange(nodes).repeat_interleave(8);
  const at::Tensor step = at::randint(1, nodes, {nodes * 8}, generator, at::TensorOptions(at::kLong));
  const at::Tensor near = at::arange(nodes * 8).remainder(2) == 0;
  const at::Tensor to = (from + at::where(near, step.remainder(5) + 1, step)).remainder(nodes);
  const Csr a = csr_from_coo(from, to, nodes, nodes);
  return gcn ? gcn_adjacency(a) : mean_adjacency(a);
}

}  // namespace

NetWeights::NetWeights(uint64_t seed, at::Device device) : generator_(at::detail::createCPUGenerator(seed)), device_(device) {}

at::Tensor NetWeights::find(const std::string& name) const {
  const auto at = std::ranges::find(all_, name, &std::pair<std::string, at::Tensor>::first);
  return at == all_.end() ? at::Tensor() : at->second;
}

at::Tensor NetWeights::add(const std::string& name, const at::Tensor& values) {
  all_.emplace_back(name, values.to(device_).requires_grad_());
  return all_.back().second;
}

at::Tensor NetWeights::normal(at::IntArrayRef shape) { return tool::normal(generator_, shape); }

at::Tensor NetWeights::matrix(const std::string& name, int64_t out, int64_t in) {
  if (const at::Tensor known = find(name); known.defined()) return known;
  return add(name, normal({out, in}) * std::sqrt(2.0 / static_cast<double>(in)));
}

at::Tensor NetWeights::kernel(const std::string& name, int64_t out, int64_t in) {
  if (const at::Tensor known = find(name); known.defined()) return known;
  return add(name, normal({out, in, 3, 3}) * std::sqrt(2.0 / static_cast<double>(9 * in)));
}

at::Tensor NetWeights::bias(const std::string& name, int64_t out) {
  if (const at::Tensor known = find(name); known.defined()) return known;
  return add(name, normal({out}) * 0.1);
}

at::Tensor NetWeights::gamma(const std::string& name, int64_t channels) {
  if (const at::Tensor known = find(name); known.defined()) return known;
  const at::Tensor values = 1 + 0.2 * normal({channels}).clamp(-3, 3);
  return add(name, at::where(at::arange(channels).remainder(4) >= 2, -values, values));
}

NormWeights NetWeights::norm(const std::string& name, int64_t channels) {
  if (const at::Tensor gamma = find(name + ".gamma"); gamma.defined()) return {gamma, find(name + ".beta"), {}, {}};
  at::Tensor gamma = 1 + 0.2 * normal({channels}).clamp(-3, 3), beta = 0.2 * normal({channels});
  for (int64_t c = 0; c < channels; ++c) {
    const double size = gamma[c].item<double>();
    if (c % 4 >= 2) gamma[c] = -size;
    if (c % 16 == 4) beta[c] = -6 * size;                 // dead
    if (c % 16 == 9 || c % 16 == 11) beta[c] = 6 * size;  // always on
  }
  const at::Tensor made = add(name + ".gamma", gamma);
  return {made, add(name + ".beta", beta), {}, {}};
}

std::span<const BiasNet> bias_nets() { return nets(); }

std::span<const BiasNet> pair_nets() {
  static const std::vector<BiasNet> kPairs = [] {
    std::vector<BiasNet> pairs;
    for (const auto& [norm_name, norm] : kNorms) {
      for (const auto& [name, activation] : kActivations) {
        for (const bool image : {false, true}) {
          for (const double p : {0.0, 0.5}) {
            const std::string layout = image ? "_images" : "_rows";
            pairs.push_back(pair_net(std::string(norm_name) + "_" + name + layout + (p > 0 ? "_dropout" : ""), norm, activation, image, p));
          }
        }
      }
    }
    return pairs;
  }();
  return kPairs;
}

NetData data_of(const BiasNet& net, at::Device device) {
  at::Generator generator = at::detail::createCPUGenerator(11);
  NetData d;
  const bool is_image = net.input == NetInput::images;
  d.x = is_image ? images_of(generator, net.rows) : rows_of(generator, net.rows);
  const at::Tensor features = is_image ? at::avg_pool2d(d.x, {4, 4}).flatten(1) : d.x;
  const at::Tensor scores = features.matmul(normal(generator, {features.size(1), kClasses}));
  d.labels = scores.argmax(1).to(device);
  d.targets = (scores / scores.std()).to(device);
  d.x = d.x.to(device);
  if (net.input == NetInput::mean_graph || net.input == NetInput::gcn_graph) {
    const Adjacency a = graph_of(generator, net.rows, net.input == NetInput::gcn_graph);
    d.graph = {to_device(a, device), multiply(a.matrix, at::eye(net.rows)).to_sparse().to(device)};
  }
  return d;
}

}  // namespace satchel::tool
