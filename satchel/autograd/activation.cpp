#include "satchel/autograd/activation.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "satchel/autograd/elu_dropout.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/norm_node.h"
#include "satchel/autograd/norm_share.h"
#include "satchel/autograd/shared.h"
#include "satchel/core/error.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

/// g · m in x's order, m being 1 where the bit is set and `slope` where not, dropped values 0.
at::Tensor masked(const at::Tensor& g, const NormAxes& axes, int64_t width, const at::Tensor& bits, const at::Tensor& seed,
                  const ChainOptions& options) {
  const at::Tensor rows = rows_of({g, {}, axes, {}, {}, width});
  return in_sizes(chain_gradient(rows, bits, seed, options), g.sizes(), axes);
}

class MaskNode : public SavingNode {
 public:
  explicit MaskNode(const std::string& layer) : SavingNode("relu", layer) {}
  PackedMask mask;
  NormAxes axes;
  int64_t width = 1;
  double slope = 0;

  std::vector<SavedTensor> lines() const override {
    int64_t values = 1;
    for (const int64_t size : mask.shape) values *= size;
    return {{layer(), "mask", mask.shape, 1, mask.bits.numel(), values}};
  }

 protected:
  variable_list back(at::Tensor g) override { return {masked(g, axes, width, mask.bits, {}, {0, slope})}; }
  void release() override { mask = {}; }
};

class DropoutNode : public SharingNode {
 public:
  explicit DropoutNode(const std::string& layer) : SharingNode("dropout", layer) {}
  NormAxes axes;
  int64_t width = 1;
  at::Tensor seed;
  PackedMask mask;  // instead of the seed, where the method keeps masks
  double p = 0;

  std::vector<SavedTensor> lines() const override {
    if (seed.defined()) return {saved_line(layer(), "seed", seed)};
    int64_t values = 1;
    for (const int64_t size : mask.shape) values *= size;
    return {{layer(), "dropout", mask.shape, 1, mask.bits.numel(), values}};
  }

 protected:
  variable_list back(at::Tensor g) override {
    if (seed.defined()) return {masked(g, axes, width, {}, seed, {p, 1})};
    return {masked(g, axes, width, mask.bits, {}, {0, 0}).mul_(dropout_scale(p))};
  }
  void release() override {
    seed.reset();
    mask = {};
    shared_.reset();
  }
};

at::Tensor with_mask(const at::Tensor& x, const std::function<at::Tensor(const at::Tensor&)>& function, double slope,
                     const Saving& saving) {
  const NoAutocast no_autocast;
  const NormCall call = plain_call(x, saving);
  const at::Tensor rows = rows_of(call);
  const auto node = make_node<MaskNode>(saving.name, x);
  node->mask = pack_mask(rows);
  node->mask.shape = x.sizes().vec();
  node->axes = call.axes;
  node->width = call.width;
  node->slope = slope;
  return attach(in_sizes(function(rows), x.sizes(), call.axes), node);
}

/// What x shares, dropped; null where it shares nothing, or something that is dropped already.
std::optional<SharedSave> dropped(const at::Tensor& x, const at::Tensor& seed, double p) {
  const auto found = readable_save_of(x);
  if (found == nullptr || found->seed.defined()) return std::nullopt;
  SharedSave save = *found;
  save.seed = seed;
  save.chain.dropout = p;
  return save;
}

/// torch's dropout from a seed of ours: on the CPU its own function draws from a generator that all threads share.
at::Tensor plain_dropout(const at::Tensor& x, double p) {
  if (!x.is_cpu() || x.numel() == 0) return std::get<0>(at::native_dropout(x, p, /*train=*/true));
  const auto seed = static_cast<uint64_t>(fresh_seed(at::kCPU).item<int64_t>());
  const at::Tensor kept = at::empty(x.sizes(), x.options().dtype(at::kBool)).bernoulli_(1 - p, at::detail::createCPUGenerator(seed));
  return x.mul(kept).mul_(1 / (1 - p));
}

at::Tensor recorded_dropout(const at::Tensor& x, const at::Tensor& values, const NormCall& call, double p, const at::Tensor& seed) {
  const Method& method = call.saving.method;
  const auto node = make_node<DropoutNode>(call.saving.name, x);
  node->axes = call.axes;
  node->width = call.width;
  node->p = p;
  const at::Tensor out = attach(values, node);
  if (method.keeps_dropout) {
    const at::Tensor ones = at::ones({x.numel() / std::max<int64_t>(call.width, 1), call.width}, x.options());
    node->mask = pack_mask(apply_chain(ones, {}, {}, {}, seed, {p, 1}));
    node->mask.shape = x.sizes().vec();
    return out;
  }
  node->seed = seed;
  if (!method.shared) return out;
  if (auto save = dropped(x, seed, p)) node->share(std::move(*save), out);
  return out;
}

}  // namespace

at::Tensor relu(const at::Tensor& x, const Saving& saving) {
  if (saving.method.plain || !records(x)) return at::relu(x);
  check_float(x, "relu");
  if (saving.method.shared && x.numel() > 0) return shared_relu(x, saving);
  return with_mask(
      x, [](const at::Tensor& in) { return at::relu(in); }, 0, saving);
}

at::Tensor leaky_relu(const at::Tensor& x, double slope, const Saving& saving) {
  if (!std::isfinite(slope)) fail("leaky_relu", "slope must be finite", slope);
  if (saving.method.plain || !records(x)) return at::leaky_relu(x, slope);
  check_float(x, "leaky_relu");
  if (saving.method.shared) {
    if (auto out = after_norm(x, Activation::leaky_relu, slope)) return *out;
  }
  return with_mask(
      x, [slope](const at::Tensor& in) { return at::leaky_relu(in, slope); }, slope, saving);
}

at::Tensor elu(const at::Tensor& x, double alpha, const Saving& saving) {
  if (saving.method.plain || !records(x)) return at::elu(x, alpha);
  return elu_dropout(x, alpha, 0, saving);
}

at::Tensor dropout(const at::Tensor& x, double p, bool training, const Saving& saving) {
  check_dropout(p, "dropout");
  if (!training || p == 0) return x;
  if (saving.method.plain) return plain_dropout(x, p);
  check_float(x, "dropout");
  const NoAutocast no_autocast;
  const at::Tensor seed = fresh_seed(x.device());
  const NormCall call = plain_call(x, saving);
  const at::Tensor out = in_sizes(apply_chain(rows_of(call), {}, {}, {}, seed, {p, 1}), x.sizes(), call.axes);
  return records(x) ? recorded_dropout(x, out, call, p, seed) : out;
}

}  // namespace satchel
