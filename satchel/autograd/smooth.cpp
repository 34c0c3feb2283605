#include "satchel/autograd/smooth.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>

#include <algorithm>
#include <functional>
#include <string>

#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

class DerivativeNode : public SavingNode {
 public:
  explicit DerivativeNode(const std::string& layer) : SavingNode("smooth", layer) {}
  Packed derivative;

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    report(derivative, layer(), "derivative", kept);
    return kept;
  }

 protected:
  variable_list back(at::Tensor g) override { return {at::mul(g, unpack(derivative))}; }
  void release() override { derivative = {}; }
};

/// `function` of x, and its derivative by `derivative`(ones, x, out).
at::Tensor smooth(const at::Tensor& x, const SavePolicy& saving, const char* op,
                  const std::function<at::Tensor(const at::Tensor&)>& function,
                  const std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>& derivative) {
  if (is_baseline(saving.method) || !needs_grad(x)) return function(x);
  check_float(x, op);
  const NoAutocast no_autocast;
  const at::Tensor in = x.detach(), out = function(in);
  const auto node = make_node<DerivativeNode>(saving.name, x);
  const CodecSpec spec = keeps_of(saving.method, {Role::derivative}).front().spec;
  node->derivative = pack(derivative(at::ones_like(in), in, out), spec, fresh_seed(x.device()));
  return attach(out, node);
}

}  // namespace

at::Tensor gelu(const at::Tensor& x, std::string_view approximate, const SavePolicy& saving) {
  const c10::string_view kind(approximate.data(), approximate.size());
  if (approximate != "none" && approximate != "tanh") fail("gelu", "approximate must be none or tanh", approximate);
  return smooth(
      x, saving, "gelu", [kind](const at::Tensor& in) { return at::gelu(in, kind); },
      [kind](const at::Tensor& one, const at::Tensor& in, const at::Tensor&) { return at::gelu_backward(one, in, kind); });
}

at::Tensor silu(const at::Tensor& x, const SavePolicy& saving) {
  return smooth(
      x, saving, "silu", [](const at::Tensor& in) { return at::silu(in); },
      [](const at::Tensor& one, const at::Tensor& in, const at::Tensor&) { return at::silu_backward(one, in); });
}

at::Tensor sigmoid(const at::Tensor& x, const SavePolicy& saving) {
  return smooth(
      x, saving, "sigmoid", [](const at::Tensor& in) { return at::sigmoid(in); },
      [](const at::Tensor& one, const at::Tensor&, const at::Tensor& out) { return at::sigmoid_backward(one, out); });
}

at::Tensor tanh(const at::Tensor& x, const SavePolicy& saving) {
  return smooth(
      x, saving, "tanh", [](const at::Tensor& in) { return at::tanh(in); },
      [](const at::Tensor& one, const at::Tensor&, const at::Tensor& out) { return at::tanh_backward(one, out); });
}

}  // namespace satchel
