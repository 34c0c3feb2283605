#include "satchel/graph/gcn.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <optional>
#include <ostream>

#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/weight_casts.h"
#include "satchel/core/error.h"
#include "satchel/core/layer_table.h"
#include "satchel/graph/product.h"
#include "satchel/graph/spmm.h"
#include "satchel/tensor/order.h"
#include "satchel/tensor/split_product.h"

namespace satchel {
namespace {

/// Inputs: x, weight, bias.
class GcnNode : public SavingNode {
 public:
  explicit GcnNode(const std::string& layer) : SavingNode("gcn", layer) {}
  Csr transpose;
  Csr matrix;               // of the data set's layer
  InputSave x, aggregated;  // aggregated: A·X of the data set, of which some rows may be kept
  SavedWeight weight;
  bool norm_follows = false;

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    x.report(layer(), "input", kept);
    return kept;
  }

 protected:
  variable_list back(at::Tensor gradient) override {
    const at::Tensor g = gradient.contiguous();
    variable_list gradients(3);
    if (needs(2)) gradients[2] = bias_gradient(g, norm_follows);
    if (aggregated.defined()) {
      if (needs(1)) gradients[1] = aggregated_product(g, aggregated.tensor(), x.tensor(), matrix);
      return gradients;
    }
    const at::Tensor w = needs(0) ? weight.unpack(g.scalar_type()) : at::Tensor();
    if (!needs(1) && needs(0) && w.size(1) < w.size(0)) {
      gradients[0] = multiply(transpose, RowProduct({w}, {}, g.size(0))({g}));
      return gradients;
    }
    if (needs(1) && by_rows(g, w, gradients)) return gradients;
    const at::Tensor ag = needs(0) || needs(1) ? multiply(transpose, g) : at::Tensor();
    if (needs(1)) gradients[1] = x.transposed_products({ag})[0].t();
    if (needs(0)) gradients[0] = RowProduct({w}, {}, ag.size(0))({ag});
    return gradients;
  }

  void release() override {
    x.release();
    aggregated.release();
    weight.reset_data();
  }

 private:
  /// A stretch of rows at a time, so that Aᵀ·g never stands beside x's gradient: false where x cannot be had by rows.
  bool by_rows(const at::Tensor& g, const at::Tensor& w, variable_list& gradients) const {
    if (!x.has_rows() || g.size(0) == 0) return false;
    const int64_t in = x.columns(), nodes = transpose.rows;
    const auto weights = needs(0) ? std::make_optional<RowProduct>(std::vector{w}, at::Tensor(), nodes) : std::nullopt;
    ProductRows product(transpose, g, needs(0) ? in : 0, weights && weights->writes_in_place());
    const auto write = [&](int64_t, int64_t, const at::Tensor& ag, at::Tensor& dx) { weights->write(dx, {ag}); };
    if (g.is_cuda()) {
      if (const std::vector<at::Tensor> products = x.products_from_codes({product.read(0, nodes)}); !products.empty()) {
        gradients[1] = products.front();
        if (needs(0)) product.write(0, nodes, write);
        gradients[0] = product.result();
        return true;
      }
    }
    gradients[1] = at::zeros({g.size(1), in}, g.options().dtype(at::kFloat));
    x.for_rows(g.scalar_type(), [&](int64_t first, int64_t last, const at::Tensor& rows) {
      add_product_(gradients[1], product.read(first, last).t(), rows);
      if (needs(0)) product.write(first, last, write);
    });
    gradients[0] = product.result();
    return true;
  }
};

/// A·x·Wᵀ + bias without gradients, on the narrower side. In x's type.
at::Tensor combine(const at::Tensor& x, const Adjacency& a, const at::Tensor& weight, const at::Tensor& given_bias) {
  const at::Tensor w = cast_weight(weight, x.scalar_type());
  const at::Tensor bias = given_bias.defined() ? cast_weight(given_bias, x.scalar_type()) : given_bias;
  if (aggregates_first(a, w.size(1), w.size(0))) {
    const RowProduct weights({w.t()}, bias, a.outputs());
    ProductRows product(a.matrix, x, w.size(0), weights.writes_in_place());
    product.write_all([&](int64_t, int64_t, const at::Tensor& ax, at::Tensor& to) { weights.write(to, {ax}); });
    return product.result();
  }
  at::Tensor out = multiply(a.matrix, RowProduct({w.t()}, {}, x.size(0))({x}));
  return bias.defined() ? out.add_(bias) : out;
}

at::Tensor plus(const at::Tensor& x, const at::Tensor& bias) { return bias.defined() ? x + bias.to(x.scalar_type()) : x; }

}  // namespace

at::Tensor gcn(const at::Tensor& x, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias, const SavePolicy& saving) {
  check_layer(x, a, weight, bias, "gcn");
  if (is_baseline(saving.method)) return plus(spmm(a, at::linear(x, weight.to(x.scalar_type()))), bias);
  const at::Tensor rows = x.detach().contiguous();
  if (!needs_grad(x, weight, bias)) return combine(rows, a, weight, bias);
  const auto node = make_node<GcnNode>(saving.name, x, weight, bias);
  node->transpose = a.transpose;
  node->norm_follows = saving.norm_follows;
  if (x.requires_grad()) node->weight = SavedWeight(weight, x.scalar_type());
  if (weight.requires_grad()) node->x = InputSave(x, saving);
  return attach(combine(rows, a, weight, bias), node);
}

at::Tensor gcn(const GraphInput& input, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias, const SavePolicy& saving) {
  check_layer(input, a, weight, bias, "gcn");
  if (input.is_sparse()) return plus(spmm(a, times_transposed(input, weight)), bias);
  if (is_baseline(saving.method) || !keeps_of(saving.method, {Role::data}).empty()) return gcn(input.x, a, weight, bias, saving);
  const bool aggregated = input.aggregated.defined();
  const auto forward = [&] {
    if (!aggregated) return combine(with_plain_rows(input.x), a, weight, bias);
    const auto as_x = [&](const at::Tensor& t) { return t.defined() ? cast_weight(t, input.x.scalar_type()) : t; };
    const RowProduct weights({as_x(weight).t()}, as_x(bias), a.outputs());
    const at::Tensor out = at::empty({a.outputs(), weight.size(0)}, input.x.options());
    for_aggregated(input.aggregated, with_plain_rows(input.x), a.matrix, [&](int64_t first, int64_t last, const at::Tensor& rows) {
      at::Tensor to = out.narrow(0, first, last - first);
      weights.write(to, {rows});
    });
    return out;
  };
  if (!needs_grad(weight, bias)) return forward();
  const auto node = make_node<GcnNode>(saving.name, at::Tensor(), weight, bias);
  node->transpose = a.transpose;
  node->norm_follows = saving.norm_follows;
  node->x = InputSave::reference(input.x);
  node->matrix = a.matrix;
  if (aggregated) node->aggregated = InputSave::reference(input.aggregated);
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

at::Tensor GcnConvImpl::forward(const at::Tensor& x, const Adjacency& a, bool norm_follows) {
  return gcn(x, a, lin_->weight, bias_, before_norm(options.saving, norm_follows));
}
at::Tensor GcnConvImpl::forward_data(const GraphInput& input, const Adjacency& a, bool norm_follows) {
  return gcn(input, a, lin_->weight, bias_, before_norm(options.saving, norm_follows));
}

at::Tensor GcnConvImpl::torch_forward(const at::Tensor& x, const TorchFunctions& torch) const {
  const at::Tensor out = torch.aggregate(torch.linear(x, lin_->weight));
  return bias_.defined() ? out + bias_ : out;  // a bias of float32 makes the sum so, as it does under autocast
}

void GcnConvImpl::pretty_print(std::ostream& stream) const {
  stream << "satchel::GcnConv(" << options.in << ", " << options.out << ", method=" << options.saving.method.name << ")";
}

const LayerFactory& layer_table::Gcn::factory() {
  static constexpr LayerFactory made{
      [](const Csr& graph, bool) { return gcn_adjacency(graph); },  // with self-loops in any case
      [](const GcnOptions& options) -> std::shared_ptr<GraphConvImpl> { return std::make_shared<GcnConvImpl>(options); }};
  return made;
}

}  // namespace satchel
