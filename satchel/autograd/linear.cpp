#include "satchel/autograd/linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>

#include <algorithm>
#include <string>
#include <vector>

#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/weight_casts.h"
#include "satchel/core/error.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/split_product.h"

namespace satchel {
namespace {

/// Rows of x's last dimension times a factor, plus a bias where there is one: by tensor cores where these serve, else `otherwise`.
template <class F>
at::Tensor rows_times(const at::Tensor& x, const at::Tensor& factor, const at::Tensor& bias, F&& otherwise) {
  const int64_t depth = x.size(-1), rows = x.numel() / std::max<int64_t>(depth, 1);
  if (factor.dim() != 2 || factor.size(0) != depth || !splits_product(factor, depth, rows)) return otherwise();
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = factor.size(1);
  const at::Tensor out = at::empty(sizes, x.options());  // no view: what follows may work in place
  at::Tensor to = out.view({rows, factor.size(1)});
  RowProduct({factor}, bias, rows).write(to, {x.reshape({rows, depth})});
  return out;
}

void check_sizes(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  constexpr const char* op = "linear";
  if (weight.dim() != 2) fail(op, "weight must have 2 dimensions, outputs × features", weight.sizes());
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0))) {
    fail(op, "bias must be a line of " + std::to_string(weight.size(0)), bias.sizes());
  }
  if (x.dim() == 0 || x.size(-1) != weight.size(1)) {
    fail(op, "x must have " + std::to_string(weight.size(1)) + " features in its last dimension", x.sizes());
  }
  if (weight.device() != x.device()) fail(op, "x must be on the weight's device, " + weight.device().str(), x.device());
}

class LinearNode : public SavingNode {
 public:
  explicit LinearNode(const std::string& layer) : SavingNode("linear", layer) {}

  InputSave input;
  SavedWeight weight;
  at::ScalarType input_type = at::kFloat, weight_type = at::kFloat, bias_type = at::kFloat;

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    input.report(layer(), "input", kept);
    return kept;
  }

 protected:
  variable_list back(at::Tensor g) override {
    const NoAutocast guard;
    variable_list gradients(3);
    if (needs(1)) input.fetch();
    const at::Tensor rows = g.reshape({-1, g.size(-1)});
    if (needs(0)) {
      const at::Tensor w = weight.unpack(g.scalar_type());
      gradients[0] = rows_times(g, w, {}, [&] { return at::matmul(g, w); }).to(input_type);
    }
    if (needs(1)) {
      input.gradient_seen(g);
      gradients[1] = input.transposed_products({g})[0].t().to(weight_type);
    }
    if (needs(2)) gradients[2] = column_sums(rows).to(bias_type);
    return gradients;
  }

  void release() override {
    input.release();
    weight.reset_data();
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const SavePolicy& saving) {
  check_tensor(x, "linear");
  check_tensor(weight, "linear");
  check_sizes(x, weight, bias);
  if (x.dim() == 1) return linear(x.unsqueeze(0), weight, bias, saving).squeeze(0);
  const at::ScalarType type = layer_type(x);
  const NoAutocast guard;
  const auto as_type = [&](const at::Tensor& t) { return t.defined() ? t.to(type) : t; };
  if (is_baseline(saving.method) || !needs_grad(x, weight, bias)) return at::linear(as_type(x), as_type(weight), as_type(bias));
  check_float(x, "linear");
  const auto node = make_node<LinearNode>(saving.name, x, weight, bias);
  const at::Tensor values = as_type(x.detach());
  node->input_type = x.scalar_type();
  node->weight_type = weight.scalar_type();
  if (bias.defined()) node->bias_type = bias.scalar_type();
  if (weight.requires_grad()) node->input = InputSave(x, saving, {Reads::rows, values, 1});
  if (x.requires_grad()) node->weight = SavedWeight(weight, type);
  const at::Tensor w = cast_weight(weight, type), b = bias.defined() ? cast_weight(bias, type) : bias;
  return attach(rows_times(values, w.t(), b, [&] { return at::linear(values, w, b); }), node);
}

}  // namespace satchel
