#include "satchel/autograd/activation.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "satchel/autograd/epilogue.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/shared.h"
#include "satchel/core/error.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

class DropoutNode : public SharingNode {
 public:
  explicit DropoutNode(const std::string& layer) : SharingNode("dropout", layer) {}
  EpilogueForm form;
  at::Tensor seed;
  at::Tensor mask;  // a bit a value instead of the seed, where the method keeps masks

  std::vector<SavedTensor> lines() const override {
    if (seed.defined()) return {saved_line(layer(), "seed", seed)};
    return {{layer(), "dropout", form.sizes, 1, mask.numel(), c10::multiply_integers(form.sizes)}};
  }

 protected:
  variable_list back(at::Tensor g) override {
    const at::Tensor rows = form.as_rows(g);
    if (seed.defined()) return {form.in_sizes(chain_gradient(rows, {}, seed, {form.dropout, 1}))};
    return {form.in_sizes(chain_gradient(rows, mask, {}, {0, 0})).mul_(dropout_scale(form.dropout))};
  }
  void release() override {
    seed.reset();
    mask.reset();
    shared_.reset();
  }
};

class Relu6Node : public SavingNode {
 public:
  explicit Relu6Node(const std::string& layer) : SavingNode("relu6", layer) {}
  EpilogueForm form;
  at::Tensor on;  // a bit a value

  std::vector<SavedTensor> lines() const override {
    return {{layer(), "mask", form.sizes, 1, on.numel(), c10::multiply_integers(form.sizes)}};
  }

 protected:
  variable_list back(at::Tensor g) override {
    const at::Tensor rows = form.gradient_rows(std::move(g));
    chain_gradient_(rows, on, {}, {0, 0});
    return {form.in_sizes(rows)};
  }
  void release() override { on.reset(); }
};

/// 0 or 1/(1 − p) for each sample of x, in x's type, to be multiplied with it.
at::Tensor sample_factors(const at::Tensor& x, const at::Tensor& seed, double p) {
  std::vector<int64_t> sizes(static_cast<size_t>(x.dim()), 1);
  sizes[0] = x.size(0);
  return apply_chain(at::ones({x.size(0), 1}, x.options().memory_format(c10::nullopt)), {}, {}, {}, seed, {p, 1}).view(sizes);
}

class DropSamplesNode : public SavingNode {
 public:
  explicit DropSamplesNode(const std::string& layer) : SavingNode("drop_samples", layer) {}
  at::Tensor seed;
  double p = 0;

  std::vector<SavedTensor> lines() const override { return {saved_line(layer(), "seed", seed)}; }

 protected:
  variable_list back(at::Tensor g) override {
    const NoAutocast guard;
    return {g.mul(sample_factors(g, seed, p))};
  }
  void release() override { seed.reset(); }
};

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

at::Tensor recorded_dropout(const at::Tensor& x, const at::Tensor& values, const EpilogueCall& call, const at::Tensor& seed) {
  const auto node = make_node<DropoutNode>(call.saving.name, x);
  node->form = call;
  const at::Tensor out = attach(values, node);
  Site site;
  site.drops = true;
  if (find(keeps_of(call.saving.method, site), Kind::dropout) != nullptr) {
    const at::Tensor ones = at::ones({x.numel() / std::max<int64_t>(call.width, 1), call.width}, x.options());
    node->mask = pack_mask(apply_chain(ones, {}, {}, {}, seed, {call.dropout, 1})).bits;
    return out;
  }
  node->seed = seed;
  if (!reads_producer(call.saving.method)) return out;
  if (auto save = dropped(x, seed, call.dropout)) node->share(std::move(*save), out);
  return out;
}

/// An activation as a function of its own. ReLU and LeakyReLU claim the norm that defers, where x is its output.
at::Tensor recorded_activation(const at::Tensor& x, Activation activation, double slope, double alpha, const SavePolicy& saving) {
  std::optional<EpilogueCall> claimed;
  if (reads_producer(saving.method) && activation != Activation::elu) claimed = claim_norm(x);
  EpilogueCall call = claimed ? std::move(*claimed) : value_call(x, saving);
  call.activation = activation;
  call.slope = slope;
  call.alpha = alpha;
  call.next_reads = claimed.has_value();
  return epilogue(std::move(call));
}

}  // namespace

at::Tensor relu(const at::Tensor& x, const SavePolicy& saving) {
  if (is_baseline(saving.method) || !needs_grad(x) || x.numel() == 0) return at::relu(x);
  check_float(x, "relu");
  return recorded_activation(x, Activation::relu, 0, 1, saving);
}

at::Tensor leaky_relu(const at::Tensor& x, double slope, const SavePolicy& saving) {
  if (!std::isfinite(slope)) fail("leaky_relu", "slope must be finite", slope);
  if (is_baseline(saving.method) || !needs_grad(x) || x.numel() == 0) return at::leaky_relu(x, slope);
  check_float(x, "leaky_relu");
  return recorded_activation(x, Activation::leaky_relu, slope, 1, saving);
}

at::Tensor relu6(const at::Tensor& x, const SavePolicy& saving) {
  if (is_baseline(saving.method) || !needs_grad(x) || x.numel() == 0) return at::hardtanh(x, 0, 6);
  check_float(x, "relu6");
  const NoAutocast no_autocast;
  const auto node = make_node<Relu6Node>(saving.name, x);
  const EpilogueCall call = value_call(x, saving);
  const at::Tensor rows = call.as_rows(x);
  node->form = call;
  node->on = pack_mask(rows.le(0).logical_or_(rows.ge(6)).logical_not_()).bits;
  return attach(call.in_sizes(at::clamp(rows, 0, 6)), node);
}

at::Tensor elu(const at::Tensor& x, double alpha, const SavePolicy& saving) {
  if (is_baseline(saving.method) || !needs_grad(x)) return at::elu(x, alpha);
  if (!(alpha >= 0) || !std::isfinite(alpha)) fail("elu", "alpha must be finite and at least 0", alpha);
  if (x.dim() == 0 || (x.scalar_type() != at::kFloat && x.scalar_type() != at::kBFloat16 && x.scalar_type() != at::kHalf)) {
    fail("elu", "x must be float32, bfloat16 or float16 with at least one dimension", x.toString());
  }
  if (x.numel() == 0) return at::elu(x, alpha);
  return recorded_activation(x, Activation::elu, 1, alpha, saving);
}

at::Tensor dropout(const at::Tensor& x, double p, bool training, const SavePolicy& saving) {
  check_dropout(p, "dropout");
  if (!training || p == 0) return x;
  if (is_baseline(saving.method)) return plain_dropout(x, p);
  check_float(x, "dropout");
  const NoAutocast no_autocast;
  const at::Tensor seed = fresh_seed(x.device());
  EpilogueCall call = value_call(x, saving);
  call.dropout = p;
  const at::Tensor out = call.in_sizes(apply_chain(call.as_rows(x), {}, {}, {}, seed, {p, 1}));
  return needs_grad(x) ? recorded_dropout(x, out, call, seed) : out;
}

at::Tensor drop_samples(const at::Tensor& x, double p, bool training, const SavePolicy& saving) {
  constexpr const char* op = "drop_samples";
  check_dropout(p, op);
  if (!training || p == 0) return x;
  check_float(x, op);
  if (x.dim() == 0) fail(op, "x must have at least one dimension", 0);
  const NoAutocast no_autocast;
  const at::Tensor seed = fresh_seed(x.device()), factors = sample_factors(x, seed, p);
  if (is_baseline(saving.method) || !needs_grad(x)) return x.mul(factors);
  const auto node = make_node<DropSamplesNode>(saving.name, x);
  node->seed = seed;
  node->p = p;
  return attach(x.detach().mul(factors), node);
}

}  // namespace satchel
