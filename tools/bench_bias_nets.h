// The nets of `satchel bench bias`. Each is written once, over functions that are either torch's own or Satchel's.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "satchel/autograd/norm_act.h"
#include "satchel/graph/csr.h"

namespace satchel::tool {

/// One matrix twice: for Satchel's layers, and as torch's own sparse one.
struct NetGraph {
  Adjacency adjacency;
  at::Tensor sparse;
};

/// The functions a net calls; BatchNorm is in training mode, and channels_last order is allowed. Dropout's masks are those that Satchel
/// draws from counters, in torch's implementation too: a function's mask depends on the pass alone where `norm_act` draws it with its code,
/// and is the same in every pass where `dropout` draws it.
class NetFunctions {
 public:
  using T = const at::Tensor&;
  virtual ~NetFunctions() = default;
  virtual at::Tensor linear(T x, T weight, T bias) = 0;
  virtual at::Tensor conv(T x, T weight, int64_t stride) = 0;  // 3 × 3, padded
  virtual at::Tensor batch_norm(T x, const NormWeights& w) = 0;
  virtual at::Tensor layer_norm(T x, const NormWeights& w) = 0;  // over γ's sizes
  virtual at::Tensor rms_norm(T x, const NormWeights& w) = 0;    // likewise, without β
  virtual at::Tensor group_norm(T x, int64_t groups, const NormWeights& w) = 0;
  virtual at::Tensor relu(T x) = 0;
  virtual at::Tensor leaky_relu(T x) = 0;
  virtual at::Tensor elu(T x) = 0;
  virtual at::Tensor gelu(T x) = 0;
  virtual at::Tensor gelu_tanh(T x) = 0;
  virtual at::Tensor silu(T x) = 0;
  virtual at::Tensor tanh(T x) = 0;
  virtual at::Tensor sigmoid(T x) = 0;
  virtual at::Tensor max_pool(T x) = 0;  // 2 × 2
  virtual at::Tensor dropout(T x, double p) = 0;
  virtual at::Tensor norm_act(T x, const NormWeights& w, Norm norm, double p) = 0;  // norm → ReLU → dropout
  virtual at::Tensor norm_add(T x, const NormWeights& w, T skip) = 0;               // relu(batch_norm(x) + skip)
  virtual at::Tensor sage(T x, const NetGraph& a, T neighbour, T self) = 0;
  virtual at::Tensor gcn(T x, const NetGraph& a, T weight) = 0;
};

/// A net's parameters by name, made when they are first asked for. Of a norm's channels half have γ < 0; one in 16 is dead and two in 16
/// are always on (β = ∓6·|γ|).
class NetWeights {
 public:
  NetWeights(uint64_t seed, at::Device device);
  at::Tensor matrix(const std::string& name, int64_t out, int64_t in);
  at::Tensor kernel(const std::string& name, int64_t out, int64_t in);  // 3 × 3
  at::Tensor bias(const std::string& name, int64_t out);
  NormWeights norm(const std::string& name, int64_t channels);
  at::Tensor gamma(const std::string& name, int64_t channels);  // without β
  const std::vector<std::pair<std::string, at::Tensor>>& all() const { return all_; }

 private:
  at::Tensor find(const std::string& name) const;
  at::Tensor add(const std::string& name, const at::Tensor& values);
  at::Tensor normal(at::IntArrayRef shape);

  at::Generator generator_;
  at::Device device_;
  std::vector<std::pair<std::string, at::Tensor>> all_;
};

struct NetData {
  at::Tensor x;        // rows × 32, or samples × 8 × 8 × 8
  at::Tensor labels;   // int64, of 10 classes, which a fixed linear function of x gives
  at::Tensor targets;  // rows × 10: what that function gives
  NetGraph graph;      // graph nets
};

enum class NetInput : uint8_t { rows, images, mean_graph, gcn_graph };

struct BiasNet {
  std::string name;
  NetInput input;
  int64_t rows;     // rows, samples or nodes
  bool mask_moves;  // its dropout's masks differ from pass to pass
  std::function<at::Tensor(NetFunctions& f, NetWeights& w, const NetData& d)> forward;
  std::string text;  // one line for help
};

/// Nets of many kinds.
std::span<const BiasNet> bias_nets();
/// A weight, a norm, an activation, dropout or none, a weight: every norm × activation × layout × dropout, named so
/// (`layer_gelu_rows_dropout`). Rows of 64 channels and images of 16 × 8 × 8, over all of which LayerNorm and RMSNorm are taken.
std::span<const BiasNet> pair_nets();
NetData data_of(const BiasNet& net, at::Device device);

}  // namespace satchel::tool
