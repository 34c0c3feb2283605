// GIN (Xu et al. 2019) in the form of PyG's model of that name, with ε = 0: relu((x + Σ neighbours)·W₁ᵀ + b₁)·W₂ᵀ + b₂.
// x + Σ neighbours is (A + I)·x, so the first product is gcn() with that matrix and keeps x alone (theory.md 9). The ReLU keeps one code,
// which the second product shares where the method shares saves.
#include <ATen/ops/relu.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <memory>
#include <ostream>
#include <utility>

#include "satchel/autograd/linear.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/core/error.h"
#include "satchel/core/layer_table.h"
#include "satchel/graph/gcn.h"
#include "satchel/graph/layer.h"
#include "satchel/graph/product.h"
#include "satchel/graph/spmm.h"

namespace satchel {
namespace {

/// Parameters as PyG's GIN names them: nn.lins.0 and nn.lins.1, each weight and bias.
class GinConvImpl : public GraphConvImpl {
 public:
  explicit GinConvImpl(const GraphConvOptions& given) : options_(given) {
    const auto& [in, out, bias, saving] = options_;
    if (in < 1 || out < 1) fail("gin", "in and out must be at least 1", std::min(in, out));
    first_ = torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
    second_ = torch::nn::Linear(torch::nn::LinearOptions(out, out).bias(bias));
    const auto mlp = register_module("nn", std::make_shared<torch::nn::Module>("MLP"));
    mlp->register_module("lins", torch::nn::ModuleList(first_, second_));
  }

  void reset_parameters() override {
    first_->reset_parameters();
    second_->reset_parameters();
  }

  // The first product's bias goes through a ReLU: a norm behind the layer says nothing of it.
  at::Tensor forward(const at::Tensor& x, const Adjacency& a, bool) override {
    check_layer(x, a, first_->weight, first_->bias, "gin");
    if (!is_baseline(options_.saving.method)) return from_hidden(gcn(x, a, first_->weight, first_->bias, options_.saving));
    return from_hidden(linear(spmm(a, x), first_->weight, first_->bias, options_.saving));
  }

  at::Tensor forward_data(const GraphInput& input, const Adjacency& a, bool) override {
    check_layer(input, a, first_->weight, first_->bias, "gin");
    if (is_baseline(options_.saving.method) && !input.is_sparse()) return forward(input.x, a, false);
    return from_hidden(gcn(input, a, first_->weight, first_->bias, options_.saving));
  }

  at::Tensor torch_forward(const at::Tensor& x, const TorchFunctions& torch) const override {
    const at::Tensor hidden = torch.linear(torch.aggregate(x), first_->weight, first_->bias);
    return torch.linear(at::relu(hidden), second_->weight, second_->bias);
  }

  void pretty_print(std::ostream& stream) const override {
    stream << "satchel::GinConv(" << options_.in << ", " << options_.out << ", method=" << options_.saving.method.name << ")";
  }

 private:
  at::Tensor from_hidden(at::Tensor hidden) const {
    NormActOptions relu;
    relu.norm = Norm::none;
    const at::Tensor active = norm_act(std::move(hidden), {}, relu, part(".nn.act"));
    return linear(active, second_->weight, second_->bias, part(".nn.lins.1"));
  }

  SavePolicy part(const char* name) const {
    SavePolicy saving = options_.saving;
    saving.name += name;
    return saving;
  }

  GraphConvOptions options_;
  torch::nn::Linear first_ = nullptr, second_ = nullptr;
};

}  // namespace

const LayerFactory& layer_table::Gin::factory() {
  static constexpr LayerFactory made{
      [](const Csr& graph, bool) { return adjacency(with_self_loops(graph)); },
      [](const GraphConvOptions& options) -> std::shared_ptr<GraphConvImpl> { return std::make_shared<GinConvImpl>(options); }};
  return made;
}

}  // namespace satchel
