// Steps of layers whose products are on tensor cores: output and gradients beside float64, there and on the CPU.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "satchel/autograd/input.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/shared.h"
#include "satchel/graph/gcn.h"
#include "satchel/graph/sage.h"
#include "satchel/tensor/split_product.h"
#include "split_common.h"
#include "tests/autograd/gradient.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

/// A·x in float64, entry by entry.
at::Tensor in_double(const Csr& a, const at::Tensor& x) {
  const at::Tensor row = at::repeat_interleave(a.start.diff());
  at::Tensor value = at::ones({a.entries()}, at::kDouble);
  if (a.value.defined()) value = value * a.value;
  if (a.row_scale.defined()) value = value * a.row_scale.index_select(0, row);
  if (a.column_scale.defined()) value = value * a.column_scale.index_select(0, a.column);
  return at::zeros({a.rows, x.size(1)}, at::kDouble).index_add_(0, row, value.unsqueeze(1) * x.to(at::kDouble).index_select(0, a.column));
}

/// A graph layer's numbers, on the CPU: GCN's, or GraphSAGE's, which has weights of its own for the node itself.
struct LayerCase {
  bool is_sage;
  std::string method;
  Adjacency a;
  int64_t longest;  // row of A or of its transpose
  at::Tensor x, g, bias;
  Tensors weights;  // neighbours', and the node's own

  LayerCase(bool sage, std::string name, int64_t out) : is_sage(sage), method(std::move(name)) {
    constexpr int64_t kNodes = 4096, kIn = 128;
    auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{61});
    const at::Tensor ends = at::randint(0, kNodes, {2, 20000}, generator, at::TensorOptions(at::kLong));
    const Csr edges = made_symmetric(csr_from_coo(ends[0], ends[1], kNodes, kNodes));
    a = sage ? mean_adjacency(edges) : gcn_adjacency(edges);
    longest = std::max(a.matrix.start.diff().max().item<int64_t>(), a.transpose.start.diff().max().item<int64_t>());
    x = normal({kNodes, kIn}, 62);
    g = normal({kNodes, out}, 63);
    bias = normal({out}, 64);
    weights = {normal({out, kIn}, 65)};
    if (sage) weights.push_back(normal({out, kIn}, 66));
  }
};

/// What one step of it gave, on the CPU again.
struct Step {
  at::Tensor z, kept, kept_aggregate, out, x_gradient, bias_gradient;  // z: the layer's input; kept: z as backward read it
  Tensors weight_gradients;

  Step(const LayerCase& c, at::Device device) {
    const SavePolicy saving{parse_method(c.method), "layer"};
    const Adjacency a = to_device(c.a, device);
    const auto leaf = [&](const at::Tensor& t) { return t.clone().to(device).requires_grad_(); };
    const at::Tensor x = leaf(c.x), bias = leaf(c.bias);
    test::Inputs inputs{x, bias};
    for (const at::Tensor& w : c.weights) inputs.push_back(leaf(w));
    at::manual_seed(67);
    NormActOptions act;
    act.norm = Norm::none;
    act.dropout = 0.5;
    const at::Tensor input = saving.method.shared ? norm_act(x, {}, act, saving) : x;
    const at::Tensor y = c.is_sage ? sage(input, a, {inputs[2], inputs[3], bias}, saving) : gcn(input, a, inputs[2], bias, saving);
    keep(saving.method, a.matrix, input);
    const auto gradients = test::gradients_of(y, c.g.to(device), inputs);
    z = input.detach().cpu(), out = y.detach().cpu();
    x_gradient = gradients[0].cpu(), bias_gradient = gradients[1].cpu();
    for (size_t i = 2; i < gradients.size(); ++i) weight_gradients.push_back(gradients[i].cpu());
  }

 private:
  /// From the shared save; or what packing gives with the seeds that the layer drew, first x's, then A·x's.
  void keep(const Method& method, const Csr& matrix, const at::Tensor& input) {
    if (method.shared) {
      kept = SharedRows(*readable_save_of(input)).input(0, input.size(0)).cpu();
      return;
    }
    at::manual_seed(67);
    const at::Tensor seeds = draw_seeds(2, input.device()), x = input.detach();
    kept = unpack(pack(x, method.input, seeds.narrow(0, 0, 1))).cpu();
    kept_aggregate = unpack(pack(multiply(matrix, x), method.input, seeds.narrow(0, 1, 1))).cpu();
  }
};

/// A·x and x, as GraphSAGE multiplies them, or A·x alone.
struct Pair {
  Tensors values, magnitudes;

  Pair(const LayerCase& c, const Csr& a, const at::Tensor& x) : values{in_double(a, x)}, magnitudes{in_double(a, x.abs())} {
    if (c.is_sage) values.push_back(x), magnitudes.push_back(x);
  }
};

/// Roundings of one device, in shares of the terms' magnitudes.
struct Shares {
  double forth, back;  // rows times weights; gradients of weights

  Shares(const LayerCase& c, const Tensors& factors, bool cuda) {
    // A's sums, scales and rounding; the CPU's products: as many roundings as terms, bias and a projection's 16 columns among them.
    const double a = static_cast<double>(c.longest + 4) * 0x1p-24, rows = static_cast<double>(c.x.size(0));
    const auto depth = static_cast<double>(2 * std::max(c.x.size(1), c.g.size(1)));
    forth = a + (cuda ? share_of(factors) : (depth + 2) * 0x1p-24);
    back = a + (cuda ? gradient_share(c.x.size(0), c.g.size(1), c.x.size(1)) : (rows + 20) * 0x1p-24);
  }
};

void expect_step(const LayerCase& c, at::Device device) {
  const Step got(c, device);
  const Method method = parse_method(c.method);
  Tensors factors;
  for (const at::Tensor& w : c.weights) factors.push_back(w.t());
  const Shares share(c, factors, device.is_cuda());
  const Pair x(c, c.a.matrix, got.z), g(c, c.a.transpose, c.g);
  EXPECT_LE(Exact(x.values, x.magnitudes, factors, c.bias).over(got.out, share.forth), 1) << "output";
  Exact dx(g.values, g.magnitudes, c.weights, {});
  if (method.shared) dx.value = dx.value * (got.z > 0) * 2, dx.sizes = dx.sizes * 2;  // ReLU, and dropout of one half
  EXPECT_LE(dx.over(got.x_gradient, share.forth), 1) << "input's gradient";
  EXPECT_LE(Exact({at::ones({1, c.g.size(0)})}, {c.g}).over(got.bias_gradient.unsqueeze(0), share.back), 1) << "bias's gradient";
  for (size_t i = 0; i < c.weights.size(); ++i) {
    const bool aggregate = i == 0 && method.keeps_aggregate && c.is_sage;  // gᵀ·(A·x) from A·x as it was kept, else (Aᵀ·g)ᵀ·x
    const size_t from = aggregate ? 1 : i;
    Exact dw({g.values[from].t()}, {g.magnitudes[from].t()}, {aggregate ? got.kept_aggregate : got.kept}, {});
    // Products of projected rows have at most 61 roundings, fewer than these (project_product_cuda_test.cpp), of Σ|Z||P|, which may exceed
    // |x̂| by √16.
    if (!method.shared) dw.sizes = at::full_like(dw.sizes, 4 * dw.sizes.max().item<double>());
    EXPECT_LE(dw.over(got.weight_gradients[i], share.back), 1) << "gradient of weight " << i;
  }
}

TEST_F(SplitProduct, StepsOfGraphLayersAreRightWithinRounding) {
  for (const bool is_sage : {true, false}) {
    for (const char* method : {"satchel", "satchel,bits=3", "exact"}) {
      for (const int64_t out : {256, 128, 64}) {  // weights' gradients from decoded rows, or from codes; aggregated after the product
        if (!mine()) continue;
        SCOPED_TRACE(std::string(method) + (is_sage ? " sage " : " gcn ") + std::to_string(out));
        const LayerCase c(is_sage, method, out);
        ASSERT_TRUE(splits_gradient(c.g.cuda().t(), c.x.cuda()));
        for (const at::Device device : {at::Device(at::kCPU), at::Device(at::kCUDA, 0)}) expect_step(c, device);
        if (!parse_method(method).shared) continue;
        // Nothing before the save is a sum: both devices have the same codes.
        EXPECT_TRUE(same(Step(c, at::kCPU).kept, Step(c, at::Device(at::kCUDA, 0)).kept));
      }
    }
  }
}

TEST_F(SplitProduct, LinearLayersTakeItToo) {
  const SavePolicy saving{parse_method("satchel"), "layer"};
  const at::Tensor x = normal({2, 1500, 100}, 71).cuda().requires_grad_(), g = normal({2, 1500, 128}, 72).cuda();
  const at::Tensor w = normal({128, 100}, 73).cuda().requires_grad_(), bias = normal({128}, 74).cuda().requires_grad_();
  const at::Tensor y = linear(x, w, bias, saving), rows = x.detach().reshape({3000, 100}), g_rows = g.reshape({3000, 128});
  EXPECT_TRUE(same(y.detach().reshape({3000, 128}), RowProduct({w.detach().t()}, bias.detach(), 3000)({rows})));
  const at::Tensor dx = test::gradients_of(y, g, {x, w, bias})[0];
  EXPECT_TRUE(same(dx.reshape({3000, 100}), RowProduct({w.detach()}, {}, 3000)({g_rows})));
  EXPECT_LE(Exact({g_rows}, {w.detach()}).over(dx.reshape({3000, 100}), share_of(Tensors{w.detach()})), 1);
}

TEST_F(SplitProduct, WhatFollowsALinearLayerMayWorkInPlace) {
  const SavePolicy saving{parse_method("satchel"), "layer"};
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{3000, 100}, {2, 1500, 100}}) {
    const at::Tensor x = normal(sizes, 75).cuda().requires_grad_(), w = normal({128, 100}, 76).cuda().requires_grad_();
    const at::Tensor y = linear(x, w, {}, saving), passed = (y.detach() > 0).to(at::kFloat);
    y.clone().relu_().sum().backward();
    const at::Tensor want = x.grad().clone();
    x.mutable_grad().zero_();
    linear(x, w, {}, saving).relu_().sum().backward();
    EXPECT_TRUE(same(x.grad(), want)) << sizes.size() << " dimensions";
    EXPECT_LE(Exact({passed.reshape({3000, 128})}, {w.detach()}).over(want.reshape({3000, 100}), share_of(Tensors{w.detach()})), 1);
  }
}

}  // namespace
}  // namespace satchel
