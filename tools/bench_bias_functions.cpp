#include "tools/bench_bias_functions.h"

#include <ATen/ATen.h>

#include "satchel/autograd/activation.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/norm.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/pool.h"
#include "satchel/autograd/smooth.h"
#include "satchel/core/noise.h"
#include "satchel/graph/gcn.h"
#include "satchel/graph/sage.h"
#include "satchel/tensor/chain.h"

namespace satchel::tool {
namespace {

constexpr uint64_t kMaskRun = 101, kRoundingRun = 202;
constexpr int64_t kSeeds = 256;  // of one pass
constexpr double kSlope = 0.2, kRmsEps = 1e-6;

at::Tensor seeds_of(uint64_t run, uint64_t pass, uint32_t first, int64_t count, at::Device device) {
  at::Tensor seeds = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    seeds.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(derive_seed(run, pass, 0, first + static_cast<uint32_t>(i)));
  }
  return seeds.to(device);
}

/// Hands out the seed of every function that drops values, in the order of their calls.
class MaskSeeds {
 public:
  MaskSeeds(uint64_t pass, at::Device device) : pass_(pass), device_(device) {}
  at::Tensor fixed() { return seeds_of(kMaskRun, 0, calls_++, 1, device_); }
  at::Tensor moving() { return seeds_of(kMaskRun, pass_ + 1, calls_++, 1, device_); }

 private:
  uint64_t pass_;
  at::Device device_;
  uint32_t calls_ = 0;
};

class Torchs final : public NetFunctions {
 public:
  Torchs(uint64_t pass, at::Device device) : seeds_(pass, device) {}

  at::Tensor linear(T x, T weight, T bias) override { return at::linear(x, weight, bias); }
  at::Tensor conv(T x, T weight, int64_t stride) override { return at::conv2d(x, weight, {}, stride, 1); }
  at::Tensor batch_norm(T x, const NormWeights& w) override {
    return at::batch_norm(x, w.gamma, w.beta, {}, {}, /*training=*/true, 0.1, 1e-5, /*cudnn_enabled=*/true);
  }
  at::Tensor layer_norm(T x, const NormWeights& w) override { return at::layer_norm(x, w.gamma.sizes(), w.gamma, w.beta); }
  at::Tensor rms_norm(T x, const NormWeights& w) override { return at::rms_norm(x, w.gamma.sizes(), w.gamma, kRmsEps); }
  at::Tensor group_norm(T x, int64_t groups, const NormWeights& w) override { return at::group_norm(x, groups, w.gamma, w.beta); }
  at::Tensor relu(T x) override { return at::relu(x); }
  at::Tensor leaky_relu(T x) override { return at::leaky_relu(x, kSlope); }
  at::Tensor elu(T x) override { return at::elu(x); }
  at::Tensor gelu(T x) override { return at::gelu(x); }
  at::Tensor gelu_tanh(T x) override { return at::gelu(x, "tanh"); }
  at::Tensor silu(T x) override { return at::silu(x); }
  at::Tensor tanh(T x) override { return at::tanh(x); }
  at::Tensor sigmoid(T x) override { return at::sigmoid(x); }
  at::Tensor max_pool(T x) override { return at::max_pool2d(x, 2); }
  at::Tensor dropout(T x, double p) override { return dropped(x, p, seeds_.fixed()); }
  at::Tensor norm_act(T x, const NormWeights& w, Norm norm, double p) override {
    const at::Tensor y = at::relu(norm == Norm::batch ? batch_norm(x, w) : layer_norm(x, w));
    return p > 0 ? dropped(y, p, seeds_.moving()) : y;
  }
  at::Tensor norm_add(T x, const NormWeights& w, T skip) override { return at::relu(batch_norm(x, w) + skip); }
  at::Tensor sage(T x, const NetGraph& a, T neighbour, T self) override {
    return at::linear(at::_sparse_mm(a.sparse, x), neighbour) + at::linear(x, self);
  }
  at::Tensor gcn(T x, const NetGraph& a, T weight) override { return at::_sparse_mm(a.sparse, at::linear(x, weight)); }

 private:
  /// Times 0 or 1/keep. Images are drawn in channels_last order.
  static at::Tensor dropped(T x, double p, const at::Tensor& seed) {
    const at::Tensor rows = at::ones({x.numel() / x.size(1), x.size(1)}, x.options().requires_grad(false));
    const at::Tensor factors = apply_chain(rows, {}, {}, {}, seed, {p, 1});
    return x * (x.dim() == 4 ? factors.view({x.size(0), x.size(2), x.size(3), x.size(1)}).permute({0, 3, 1, 2}) : factors);
  }

  MaskSeeds seeds_;
};

class Satchels final : public NetFunctions {
 public:
  Satchels(const Method& method, uint64_t pass, at::Device device)
      : saving_{method}, seeds_(pass, device), bank_(seeds_of(kRoundingRun, pass, 0, kSeeds, device)) {}

  at::Tensor linear(T x, T weight, T bias) override { return satchel::linear(x, weight, bias, saving_); }
  at::Tensor conv(T x, T weight, int64_t stride) override {
    ConvOptions options;
    options.stride = {stride};
    options.padding = {1};
    return satchel::conv(x, weight, {}, options, saving_);
  }
  at::Tensor batch_norm(T x, const NormWeights& w) override { return satchel::batch_norm(x, w, {}, saving_); }
  at::Tensor layer_norm(T x, const NormWeights& w) override { return satchel::layer_norm(x, w.gamma.sizes(), w, {}, saving_); }
  at::Tensor rms_norm(T x, const NormWeights& w) override { return satchel::rms_norm(x, w.gamma.sizes(), w.gamma, kRmsEps, saving_); }
  at::Tensor group_norm(T x, int64_t groups, const NormWeights& w) override { return satchel::group_norm(x, groups, w, {}, saving_); }
  at::Tensor relu(T x) override { return satchel::relu(x, saving_); }
  at::Tensor leaky_relu(T x) override { return satchel::leaky_relu(x, kSlope, saving_); }
  at::Tensor elu(T x) override { return satchel::elu(x, 1.0, saving_); }
  at::Tensor gelu(T x) override { return satchel::gelu(x, "none", saving_); }
  at::Tensor gelu_tanh(T x) override { return satchel::gelu(x, "tanh", saving_); }
  at::Tensor silu(T x) override { return satchel::silu(x, saving_); }
  at::Tensor tanh(T x) override { return satchel::tanh(x, saving_); }
  at::Tensor sigmoid(T x) override { return satchel::sigmoid(x, saving_); }
  at::Tensor max_pool(T x) override {
    PoolOptions options;
    options.kernel = {2};
    return satchel::max_pool(x, options, saving_);
  }
  at::Tensor dropout(T x, double p) override {
    const SeedBank mask(seeds_.fixed());
    return satchel::dropout(x, p, true, saving_);
  }
  at::Tensor norm_act(T x, const NormWeights& w, Norm norm, double p) override {
    NormActOptions options;
    options.norm = norm;
    options.dropout = p;
    if (p == 0) return satchel::norm_act(x, w, options, saving_);
    const SeedBank mask(seeds_.moving());
    return satchel::norm_act(x, w, options, saving_);
  }
  at::Tensor norm_add(T x, const NormWeights& w, T skip) override { return norm_add_act(x, w, skip, {}, saving_); }
  at::Tensor sage(T x, const NetGraph& a, T neighbour, T self) override {
    return satchel::sage(x, a.adjacency, {neighbour, self, {}}, saving_);
  }
  at::Tensor gcn(T x, const NetGraph& a, T weight) override { return satchel::gcn(x, a.adjacency, weight, {}, saving_); }

 private:
  SavePolicy saving_;
  MaskSeeds seeds_;
  SeedBank bank_;
};

}  // namespace

std::unique_ptr<NetFunctions> torch_functions(uint64_t pass, at::Device device) { return std::make_unique<Torchs>(pass, device); }

std::unique_ptr<NetFunctions> satchel_functions(const Method& method, uint64_t pass, at::Device device) {
  return std::make_unique<Satchels>(method, pass, device);
}

}  // namespace satchel::tool
