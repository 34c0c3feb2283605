#include "satchel/autograd/linear.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/tensor/check.h"

namespace satchel {
namespace {

class LinearNode : public SavingNode {
 public:
  explicit LinearNode(const std::string& layer) : SavingNode("linear", layer) {}

  InputSave input;
  SavedVariable weight;

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    input.report(layer(), "input", kept);
    return kept;
  }

 protected:
  variable_list back(at::Tensor g) override {
    variable_list gradients(3);
    const at::Tensor rows = g.reshape({-1, g.size(-1)});
    if (needs(0)) gradients[0] = at::matmul(g, weight.unpack().to(g.scalar_type()));
    if (needs(1)) gradients[1] = input.transposed_products({g})[0].t();
    if (needs(2)) gradients[2] = column_sums(rows);
    return gradients;
  }

  void release() override {
    input.release();
    weight.reset_data();
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const Saving& saving) {
  const auto as_x = [&](const at::Tensor& w) { return w.defined() ? w.to(x.scalar_type()) : w; };
  if (saving.method.plain || !records(x, weight, bias)) return at::linear(x, as_x(weight), as_x(bias));
  check_float(x, "linear");
  check_no_autocast(x, "linear");
  const auto node = make_node<LinearNode>(saving.name, x, weight, bias);
  if (weight.requires_grad()) node->input = InputSave(x, saving.method);
  if (x.requires_grad()) node->weight = SavedVariable(weight, /*is_output=*/false);
  return attach(at::linear(x.detach(), as_x(weight.detach()), bias.defined() ? as_x(bias.detach()) : bias), node);
}

}  // namespace satchel
