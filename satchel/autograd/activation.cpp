#include "satchel/autograd/activation.h"

#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/relu.h>

#include <cmath>

#include "satchel/autograd/elu_dropout.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

/// One line of float32 or bfloat16 values: the kernels' view of any tensor. Shares memory where it can.
at::Tensor line_of(const at::Tensor& x) {
  return (x.scalar_type() == at::kBFloat16 ? x : x.to(at::kFloat)).contiguous().view({1, x.numel()});
}

/// g · m, m being 1 where the bit is set and `slope` where not, dropped values 0.
at::Tensor masked(at::Tensor&& g, const at::Tensor& bits, const at::Tensor& seed, const ChainOptions& options) {
  const at::Tensor out = chain_gradient(line_of(g), bits, seed, options);
  return out.view(g.sizes()).to(g.scalar_type());
}

class MaskNode : public SavingNode {
 public:
  explicit MaskNode(const std::string& layer) : SavingNode("relu", layer) {}
  PackedMask mask;
  double slope = 0;

  std::vector<SavedTensor> lines() const override {
    int64_t values = 1;
    for (const int64_t size : mask.shape) values *= size;
    return {{layer(), "mask", mask.shape, 1, mask.bits.numel(), values}};
  }

 protected:
  variable_list back(at::Tensor g) override { return {masked(std::move(g), mask.bits, {}, {0, slope})}; }
  void release() override { mask = {}; }
};

class DropoutNode : public SavingNode {
 public:
  explicit DropoutNode(const std::string& layer) : SavingNode("dropout", layer) {}
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
    if (seed.defined()) return {masked(std::move(g), {}, seed, {p, 1})};
    return {masked(std::move(g), mask.bits, {}, {0, 0}).mul_(dropout_scale(p))};
  }
  void release() override {
    seed.reset();
    mask = {};
  }
};

at::Tensor with_mask(const at::Tensor& x, at::Tensor out, double slope, const Saving& saving) {
  const auto node = make_node<MaskNode>(saving.name, x);
  node->mask = pack_mask(x);
  node->slope = slope;
  return attach(std::move(out), node);
}

}  // namespace

at::Tensor relu(const at::Tensor& x, const Saving& saving) {
  if (saving.method.plain || !records(x)) return at::relu(x);
  check_float(x, "relu");
  return with_mask(x, at::relu(x.detach()), 0, saving);
}

at::Tensor leaky_relu(const at::Tensor& x, double slope, const Saving& saving) {
  if (!std::isfinite(slope)) fail("leaky_relu", "slope must be finite", slope);
  if (saving.method.plain || !records(x)) return at::leaky_relu(x, slope);
  check_float(x, "leaky_relu");
  return with_mask(x, at::leaky_relu(x.detach(), slope), slope, saving);
}

at::Tensor elu(const at::Tensor& x, double alpha, const Saving& saving) {
  if (saving.method.plain || !records(x)) return at::elu(x, alpha);
  return elu_dropout(x, alpha, 0, saving);
}

at::Tensor dropout(const at::Tensor& x, double p, bool training, const Saving& saving) {
  check_dropout(p, "dropout");
  if (!training || p == 0) return x;
  if (saving.method.plain) return std::get<0>(at::native_dropout(x, p, /*train=*/true));
  check_float(x, "dropout");
  const at::Tensor seed = fresh_seed(x.device());
  const at::Tensor line = line_of(x.detach());
  const at::Tensor out = at::_unsafe_view(apply_chain(line, {}, {}, {}, seed, {p, 1}), x.sizes()).to(x.scalar_type());
  if (!records(x)) return out;
  const auto node = make_node<DropoutNode>(saving.name, x);
  node->p = p;
  if (saving.method.keeps_dropout) {
    node->mask = pack_mask(apply_chain(at::ones_like(line), {}, {}, {}, seed, {p, 1}));
    node->mask.shape = x.sizes().vec();
  } else {
    node->seed = seed;
  }
  return attach(out, node);
}

}  // namespace satchel
