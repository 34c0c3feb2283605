#include "satchel/graph/gcn.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <ostream>

#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"
#include "satchel/graph/check.h"
#include "satchel/graph/product_rows.h"
#include "satchel/graph/spmm.h"

namespace satchel {
namespace {

/// Inputs: x, weight, bias.
class GcnNode : public SavingNode {
 public:
  explicit GcnNode(const std::string& layer) : SavingNode("gcn", layer) {}
  Csr transpose;
  InputSave x;
  bool aggregated = false;  // what is kept is A·X of the data set
  SavedVariable weight;

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    x.report(layer(), "input", kept);
    return kept;
  }

 protected:
  variable_list back(at::Tensor gradient) override {
    const at::Tensor g = gradient.contiguous();
    variable_list gradients(3);
    if (needs(2)) gradients[2] = column_sums(g);
    if (aggregated) {
      if (needs(1)) gradients[1] = x.transposed_products({g})[0].t();
      return gradients;
    }
    const at::Tensor w = needs(0) ? weight.unpack().to(g.scalar_type()) : at::Tensor();
    if (!needs(1) && needs(0) && w.size(1) < w.size(0)) {
      gradients[0] = multiply(transpose, at::mm(g, w));
      return gradients;
    }
    if (needs(1) && by_rows(g, w, gradients)) return gradients;
    const at::Tensor ag = needs(0) || needs(1) ? multiply(transpose, g) : at::Tensor();
    if (needs(1)) gradients[1] = x.transposed_products({ag})[0].t();
    if (needs(0)) gradients[0] = at::mm(ag, w);
    return gradients;
  }

  void release() override {
    x.release();
    weight.reset_data();
  }

 private:
  /// A stretch of rows at a time, so that Aᵀ·g never stands beside x's gradient: false where x cannot be had by rows.
  bool by_rows(const at::Tensor& g, const at::Tensor& w, variable_list& gradients) const {
    if (!x.has_rows() || g.size(0) == 0) return false;
    const int64_t in = x.columns();
    gradients[1] = at::zeros({g.size(1), in}, g.options().dtype(at::kFloat));
    ProductRows product(transpose, g, needs(0) ? in : 0, stretch_rows(g.size(0), in, g.is_cuda()));
    x.for_rows(g.scalar_type(), [&](int64_t first, int64_t last, const at::Tensor& rows) {
      const at::Tensor ag = product.read(first, last).to(g.scalar_type());
      add_product_(gradients[1], ag.t(), rows);
      if (!needs(0)) return;
      at::Tensor to = product.result().narrow(0, first, last - first);
      at::mm_out(to, ag, w);
    });
    gradients[0] = product.result();
    return true;
  }
};

/// A·x·Wᵀ + bias without gradients, on the narrower side. In x's type.
at::Tensor combine(const at::Tensor& x, const Adjacency& a, const at::Tensor& weight, const at::Tensor& given_bias) {
  const at::Tensor w = weight.detach().to(x.scalar_type());
  const at::Tensor bias = given_bias.defined() ? given_bias.detach().to(x.scalar_type()) : given_bias;
  if (w.size(0) >= w.size(1)) {
    ProductRows product(a.matrix, x, w.size(0), stretch_rows(x.size(0), x.size(1), x.is_cuda()));
    for_stretches_of(x.size(0), x.size(1), x.is_cuda(), [&](int64_t first, int64_t last) {
      const at::Tensor ax = product.read(first, last);
      at::Tensor to = product.result().narrow(0, first, last - first);
      bias.defined() ? at::addmm_out(to, bias, ax, w.t()) : at::mm_out(to, ax, w.t());
    });
    return product.result();
  }
  at::Tensor out = multiply(a.matrix, at::mm(x, w.t()));
  return bias.defined() ? out.add_(bias) : out;
}

at::Tensor plus(const at::Tensor& x, const at::Tensor& bias) { return bias.defined() ? x + bias.to(x.scalar_type()) : x; }

}  // namespace

at::Tensor gcn(const at::Tensor& x, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias, const Saving& saving) {
  check_layer(x, a, weight, bias, "gcn");
  if (saving.method.plain) return plus(spmm(a, at::linear(x, weight.to(x.scalar_type()))), bias);
  const at::Tensor rows = x.detach().contiguous();
  if (!records(x, weight, bias)) return combine(rows, a, weight, bias);
  const auto node = make_node<GcnNode>(saving.name, x, weight, bias);
  node->transpose = a.transpose;
  if (x.requires_grad()) node->weight = SavedVariable(weight, /*is_output=*/false);
  if (weight.requires_grad()) node->x = InputSave(x, saving.method);
  return attach(combine(rows, a, weight, bias), node);
}

at::Tensor gcn(const GraphInput& input, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias, const Saving& saving) {
  check_layer(input, a, weight, bias, "gcn");
  if (input.is_sparse()) return plus(spmm(a, times_transposed(input, weight)), bias);
  if (saving.method.plain || saving.method.packs_data) return gcn(input.x, a, weight, bias, saving);
  const bool aggregated = input.aggregated.defined();
  const auto forward = [&] {
    if (!aggregated) return combine(input.x.contiguous(), a, weight, bias);
    const auto as_x = [&](const at::Tensor& t) { return t.defined() ? t.detach().to(input.x.scalar_type()) : t; };
    return at::linear(input.aggregated, as_x(weight), as_x(bias));
  };
  if (!records(weight, bias)) return forward();
  const auto node = make_node<GcnNode>(saving.name, at::Tensor(), weight, bias);
  node->transpose = a.transpose;
  node->x = InputSave::reference(aggregated ? input.aggregated : input.x);
  node->aggregated = aggregated;
  return attach(forward(), node);
}

GcnConvImpl::GcnConvImpl(const GcnOptions& given) : options(given) {
  if (options.in < 1 || options.out < 1) fail("gcn", "in and out must be at least 1", std::min(options.in, options.out));
  lin_ = register_module("lin", torch::nn::Linear(torch::nn::LinearOptions(options.in, options.out).bias(false)));
  if (options.bias) bias_ = register_parameter("bias", at::zeros({options.out}));
  reset_parameters();
}

void GcnConvImpl::reset_parameters() {
  torch::nn::init::xavier_uniform_(lin_->weight);
  if (bias_.defined()) torch::nn::init::zeros_(bias_);
}

at::Tensor GcnConvImpl::forward(const at::Tensor& x, const Adjacency& a) { return gcn(x, a, lin_->weight, bias_, options.saving); }
at::Tensor GcnConvImpl::forward_data(const GraphInput& input, const Adjacency& a) {
  return gcn(input, a, lin_->weight, bias_, options.saving);
}

void GcnConvImpl::pretty_print(std::ostream& stream) const {
  stream << "satchel::GcnConv(" << options.in << ", " << options.out << ", method=" << options.saving.method.name << ")";
}

}  // namespace satchel
