#include "satchel/graph/sage.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

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

/// Inputs: x, neighbour weight, own weight, bias.
class SageNode : public SavingNode {
 public:
  explicit SageNode(const std::string& layer) : SavingNode("sage", layer) {}
  Csr transpose;
  at::Tensor targets;       // the nodes whose gradients come; undefined: all
  Csr matrix;               // of the data set's layer
  InputSave x, aggregated;  // aggregated: only where a method keeps it, or the data set's own, of which some rows may be kept
  SavedWeight neighbour, self;
  bool norm_follows = false;

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    x.report(layer(), "input", kept);
    aggregated.report(layer(), "aggregate", kept);
    return kept;
  }

 protected:
  variable_list back(at::Tensor gradient) override {
    const at::Tensor g = gradient.contiguous();
    variable_list gradients(4);
    if (needs(3)) gradients[3] = bias_gradient(g, norm_follows);
    const at::Tensor own = needs(0) || needs(2) ? at_nodes(g) : g;
    if (!aggregated.defined() && by_rows(g, own, gradients)) return gradients;
    if (data_gradients(g, gradients)) return gradients;
    const bool from_x = needs(1) && !aggregated.defined();  // (A·x)ᵀ·g = xᵀ·(Aᵀ·g)
    at::Tensor ag;
    if (from_x || (needs(0) && !input_is_narrower())) ag = multiply(transpose, g);
    if (needs(1) && aggregated.defined()) gradients[1] = from_aggregated(g);
    add_products(from_x, ag, own, gradients);
    if (needs(0)) gradients[0] = input_gradient(ag, g, own);
    return gradients;
  }

  void release() override {
    x.release();
    aggregated.release();
    neighbour.reset_data();
    self.reset_data();
  }

 private:
  /// A row a node, as x has them: 0 for those that were given no output.
  at::Tensor at_nodes(const at::Tensor& g) const {
    if (!targets.defined()) return g;
    return at::zeros({transpose.rows, g.size(1)}, g.options()).index_copy_(0, targets, g);
  }

  /// All of it a stretch of rows at a time, so that Aᵀ·g never stands beside x's gradient: false where x cannot be had by rows. `own`: g
  /// at its nodes.
  bool by_rows(const at::Tensor& g, const at::Tensor& own, variable_list& gradients) const {
    if (!x.has_rows() || g.size(0) == 0 || (!needs(0) && !needs(1))) return false;
    const int64_t out = g.size(1), in = x.columns(), nodes = transpose.rows;
    const at::Tensor wl = needs(0) ? neighbour.unpack(g.scalar_type()) : at::Tensor();
    const at::Tensor wr = needs(0) ? self.unpack(g.scalar_type()) : at::Tensor();
    const auto weights = needs(0) ? std::make_optional<RowProduct>(std::vector{wl, wr}, at::Tensor(), nodes) : std::nullopt;
    ProductRows product(transpose, g, needs(0) ? in : 0, weights && weights->writes_in_place());
    const auto write = [&](int64_t first, int64_t last, const at::Tensor& ag, at::Tensor& dx) {
      weights->write(dx, {ag, own.narrow(0, first, last - first)});
    };
    if (g.is_cuda()) {
      std::vector<at::Tensor> gs;
      if (needs(1)) gs.push_back(product.read(0, nodes));
      if (needs(2)) gs.push_back(own);
      if (const std::vector<at::Tensor> products = x.products_from_codes(gs); !products.empty()) {
        if (needs(1)) gradients[1] = products.front();
        if (needs(2)) gradients[2] = products.back();
        if (needs(0)) product.write(0, nodes, write);
        gradients[0] = product.result();
        return true;
      }
    }
    const auto sums = [&](bool wanted) { return wanted ? at::zeros({out, in}, g.options().dtype(at::kFloat)) : at::Tensor(); };
    gradients[1] = sums(needs(1));
    gradients[2] = sums(needs(2));
    x.for_rows(g.scalar_type(), [&](int64_t first, int64_t last, const at::Tensor& rows) {
      const at::Tensor ag = product.read(first, last);
      if (needs(1)) add_product_(gradients[1], ag.t(), rows);
      if (needs(2)) add_product_(gradients[2], own.narrow(0, first, last - first).t(), rows);
      if (needs(0)) product.write(first, last, write);
    });
    gradients[0] = product.result();
    return true;
  }

  /// gᵀ·[X | A·X], both weights' gradients: false where the data do not stand so, or not all of it is wanted.
  bool data_gradients(const at::Tensor& g, variable_list& gradients) const {
    if (needs(0) || !needs(1) || !needs(2) || targets.defined() || !aggregated.is_reference() || !x.is_reference()) return false;
    const at::Tensor both = side_by_side(x.tensor(), aggregated.tensor());
    if (!both.defined()) return false;
    const std::vector<at::Tensor> halves = product(g.t(), both).chunk(2, 1);
    gradients[2] = halves[0], gradients[1] = halves[1];
    return true;
  }

  /// gᵀ·(A·x), the weight's gradient.
  at::Tensor from_aggregated(const at::Tensor& g) const {
    if (!aggregated.is_reference()) return aggregated.transposed_products({g})[0].t();
    return aggregated_product(g, aggregated.tensor(), x.tensor(), matrix);
  }

  bool input_is_narrower() const { return neighbour.unpack().size(1) < neighbour.unpack().size(0); }

  void add_products(bool from_x, const at::Tensor& ag, const at::Tensor& own, variable_list& gradients) const {
    std::vector<at::Tensor> gs;
    if (from_x) gs.push_back(ag);
    if (needs(2)) gs.push_back(own);
    if (gs.empty()) return;
    const std::vector<at::Tensor> products = x.transposed_products(gs);
    if (from_x) gradients[1] = products.front().t();
    if (needs(2)) gradients[2] = products.back().t();
  }

  /// Aᵀ·g·Wl + g·Wr; `ag` is undefined where aggregating after the product is narrower and nothing else needed it.
  at::Tensor input_gradient(const at::Tensor& ag, const at::Tensor& g, const at::Tensor& own) const {
    const at::Tensor wl = neighbour.unpack(g.scalar_type()), wr = self.unpack(g.scalar_type());
    if (ag.defined()) return RowProduct({wl, wr}, {}, own.size(0))({ag, own});
    return multiply(transpose, RowProduct({wl}, {}, g.size(0))({g})).addmm_(own, wr);
  }
};

/// Rows of x of the nodes whose outputs [first, last) are.
at::Tensor target_rows(const at::Tensor& x, const Adjacency& a, int64_t first, int64_t last) {
  if (!a.targets.defined()) return x.narrow(0, first, last - first);
  return at::index_select(x, 0, a.targets.narrow(0, first, last - first));
}
at::Tensor target_rows(const at::Tensor& x, const Adjacency& a) { return a.targets.defined() ? at::index_select(x, 0, a.targets) : x; }

/// x·Wlᵀ and x·Wrᵀ as columns of one matrix:  | out | gap | out | gap |.  On CUDA both begin, and rows end, at a multiple of 16 bytes, of
/// which A·x then reads rows of any width.
struct BothColumns {
  static constexpr int64_t kWord = 16;  // bytes
  int64_t out, self, all;               // where x·Wrᵀ begins and where rows end

  BothColumns(const at::Tensor& x, int64_t columns) : out(columns), self(columns), all(2 * columns) {
    if (!x.is_cuda()) return;
    const int64_t word = kWord / x.element_size();
    self = ceil_div(out, word) * word;
    all = 2 * self;
  }

  /// What belongs to the columns, zeros in the gaps.
  at::Tensor placed(const at::Tensor& neighbour, const at::Tensor& own) const {
    std::vector<at::Tensor> parts = {neighbour, own};
    const auto zeros = [&](int64_t count) {
      std::vector<int64_t> sizes = own.sizes().vec();
      sizes[0] = count;
      return at::zeros(sizes, own.options());
    };
    if (all > self + out) parts.push_back(zeros(all - self - out));
    if (self > out) parts.insert(parts.begin() + 1, zeros(self - out));
    return at::cat(parts);
  }
};

/// bias + x·Wrᵀ + A·x·Wlᵀ without gradients, on the narrower side; or through `aggregated`. In x's type.
at::Tensor combine(const at::Tensor& x, const at::Tensor& aggregated, const Adjacency& a, const SageWeights& w) {
  const auto as_x = [&](const at::Tensor& t) { return cast_weight(t, x.scalar_type()); };
  const at::Tensor bias = w.bias.defined() ? as_x(w.bias) : w.bias;
  const int64_t out = w.self.size(0), in = w.self.size(1);
  if (!aggregated.defined() && !aggregates_first(a, in, out)) {
    const BothColumns columns(x, out);
    const at::Tensor weights = columns.placed(as_x(w.neighbour), as_x(w.self)).t();
    const at::Tensor biases = bias.defined() ? columns.placed(at::zeros_like(bias), bias) : bias;
    const at::Tensor both = RowProduct({weights}, biases, x.size(0))({x});
    return multiply_plus(a.matrix, both.narrow(1, 0, out), target_rows(both.narrow(1, columns.self, out), a));
  }
  if (const at::Tensor both = side_by_side(x, aggregated); both.defined() && !a.targets.defined())
    return RowProduct({at::cat({as_x(w.self), as_x(w.neighbour)}, 1).t()}, bias, a.outputs())({both});
  const RowProduct weights({as_x(w.self).t(), as_x(w.neighbour).t()}, bias, a.outputs());
  const auto write = [&](int64_t first, int64_t last, const at::Tensor& ax, at::Tensor& to) {
    weights.write(to, {target_rows(x, a, first, last), ax});
  };
  if (aggregated.defined()) {
    const at::Tensor sum = at::empty({a.outputs(), out}, x.options());
    for_aggregated(aggregated, x, a.matrix, [&](int64_t first, int64_t last, const at::Tensor& rows) {
      at::Tensor to = sum.narrow(0, first, last - first);
      write(first, last, rows, to);
    });
    return sum;
  }
  ProductRows product(a.matrix, x, out, weights.writes_in_place() && !a.targets.defined());  // targets are gathered a stretch at a time
  product.write_all(write);
  return product.result();
}

void check_weights(const SageWeights& w, const Adjacency& a, const char* op) {
  if (!a.targets.defined() && a.outputs() != a.nodes())
    fail(op, "an adjacency must have a row a node, " + std::to_string(a.nodes()) + ", or be rows_for() some", a.outputs());
  if (!w.self.defined() || !w.neighbour.defined() || w.self.sizes() != w.neighbour.sizes())
    fail(op, "both weights must have one shape", "two");
}

std::shared_ptr<SageNode> make_sage_node(const at::Tensor& x, at::ScalarType type, const Adjacency& a, const SageWeights& w,
                                         const SavePolicy& saving) {
  auto node = make_node<SageNode>(saving.name, x, w.neighbour, w.self, w.bias);
  node->transpose = a.transpose;
  node->targets = a.targets;
  node->norm_follows = saving.norm_follows;
  node->neighbour = SavedWeight(w.neighbour, type);
  node->self = SavedWeight(w.self, type);
  return node;
}

}  // namespace

at::Tensor sage(const at::Tensor& x, const Adjacency& a, const SageWeights& w, const SavePolicy& saving) {
  check_weights(w, a, "sage");
  check_layer(x, a, w.neighbour, w.bias, "sage");
  const Method& method = saving.method;
  if (is_baseline(method)) {
    const auto as_x = [&](const at::Tensor& t) { return t.defined() ? t.to(x.scalar_type()) : t; };
    return at::linear(spmm(a, x), as_x(w.neighbour), as_x(w.bias)) + at::linear(target_rows(x, a), as_x(w.self));
  }
  const at::Tensor rows = x.detach().contiguous();
  if (!needs_grad(x, w.neighbour, w.self, w.bias)) return combine(rows, {}, a, w);
  const auto node = make_sage_node(x, x.scalar_type(), a, w, saving);
  const bool keeps_aggregate = !keeps_of(method, {Role::aggregate}).empty();
  const at::Tensor aggregated = keeps_aggregate ? multiply(a.matrix, rows) : at::Tensor();
  const bool needs_x = w.self.requires_grad() || (w.neighbour.requires_grad() && !keeps_aggregate);
  if (needs_x) node->x = InputSave(x, saving);
  if (keeps_aggregate && w.neighbour.requires_grad()) node->aggregated = InputSave(aggregated, saving);
  return attach(combine(rows, aggregated, a, w), node);
}

at::Tensor sage(const GraphInput& input, const Adjacency& a, const SageWeights& w, const SavePolicy& saving) {
  check_weights(w, a, "sage");
  check_layer(input, a, w.neighbour, w.bias, "sage");
  if (input.is_sparse()) {
    const at::Tensor own = target_rows(times_transposed(input, w.self), a);
    const at::Tensor out = own + spmm(a, times_transposed(input, w.neighbour));
    return w.bias.defined() ? out + w.bias : out;
  }
  const Method& method = saving.method;
  if (is_baseline(method) || !keeps_of(method, {Role::data}).empty()) return sage(input.x, a, w, saving);
  if (!needs_grad(w.neighbour, w.self, w.bias)) return combine(with_plain_rows(input.x), input.aggregated, a, w);
  const auto node = make_sage_node({}, input.x.scalar_type(), a, w, saving);
  node->x = InputSave::reference(input.x);
  node->matrix = a.matrix;
  if (input.aggregated.defined()) node->aggregated = InputSave::reference(input.aggregated);
  return attach(combine(with_plain_rows(input.x), input.aggregated, a, w), node);
}

SageConvImpl::SageConvImpl(const SageOptions& given) : options(given) {
  if (options.in < 1 || options.out < 1) fail("sage", "in and out must be at least 1", std::min(options.in, options.out));
  lin_l_ = register_module("lin_l", torch::nn::Linear(torch::nn::LinearOptions(options.in, options.out).bias(options.bias)));
  lin_r_ = register_module("lin_r", torch::nn::Linear(torch::nn::LinearOptions(options.in, options.out).bias(false)));
}

void SageConvImpl::reset_parameters() {
  lin_l_->reset_parameters();
  lin_r_->reset_parameters();
}

SageWeights SageConvImpl::weights() const { return {lin_l_->weight, lin_r_->weight, lin_l_->bias}; }

at::Tensor SageConvImpl::forward(const at::Tensor& x, const Adjacency& a, bool norm_follows) {
  return sage(x, a, weights(), before_norm(options.saving, norm_follows));
}
at::Tensor SageConvImpl::forward_data(const GraphInput& input, const Adjacency& a, bool norm_follows) {
  return sage(input, a, weights(), before_norm(options.saving, norm_follows));
}

at::Tensor SageConvImpl::torch_forward(const at::Tensor& x, const TorchFunctions& torch) const {
  return torch.linear(torch.aggregate(x), lin_l_->weight, lin_l_->bias) + torch.linear(x, lin_r_->weight);
}

void SageConvImpl::pretty_print(std::ostream& stream) const {
  stream << "satchel::SageConv(" << options.in << ", " << options.out << ", method=" << options.saving.method.name << ")";
}

const LayerFactory& layer_table::Sage::factory() {
  static constexpr LayerFactory made{
      [](const Csr& graph, bool self_loops) { return mean_adjacency(self_loops ? with_self_loops(graph) : graph); },
      [](const SageOptions& options) -> std::shared_ptr<GraphConvImpl> { return std::make_shared<SageConvImpl>(options); }};
  return made;
}

}  // namespace satchel
