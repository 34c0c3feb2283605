#include "tools/torch_model.h"

#include <ATen/ops/batch_norm.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/sparse_csr_tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>

namespace satchel::tool {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// torch warns that its sparse CSR tensors are in beta.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

struct TorchSpmm : torch::autograd::Function<TorchSpmm> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& matrix, const at::Tensor& transpose) {
    context->saved_data["transpose"] = transpose;
    return at::matmul(matrix, x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& g) {
    return {at::matmul(context->saved_data["transpose"].toTensor(), g[0].contiguous()), at::Tensor(), at::Tensor()};
  }
};

at::Tensor spmm(const TorchAdjacency& a, const at::Tensor& given) {
  const at::Tensor x = given.to(a.matrix.scalar_type());
  if (!x.requires_grad()) return at::matmul(a.matrix, x);
  return TorchSpmm::apply(x, a.matrix, a.transpose);
}

at::Tensor activated(const at::Tensor& x, const GraphShape& shape) {
  switch (shape.activation) {
    case Activation::relu: return at::relu(x);
    case Activation::leaky_relu: return at::leaky_relu(x, shape.slope);
    case Activation::elu: return at::elu(x, shape.alpha);
    case Activation::none: break;
  }
  return x;
}

/// Norm, activation and dropout between layers.
at::Tensor between_layers(at::Tensor x, const GraphShape& shape, const torch::OrderedDict<std::string, at::Tensor>& parameters,
                          const torch::OrderedDict<std::string, at::Tensor>& buffers, const std::string& norm) {
  if (shape.norm == Norm::batch) {
    x = at::batch_norm(x, parameters[norm + "weight"], parameters[norm + "bias"], buffers[norm + "running_mean"],
                       buffers[norm + "running_var"], true, 0.1, 1e-5, false);
  } else if (shape.norm == Norm::layer) {
    x = at::layer_norm(x.to(at::kFloat), {shape.hidden}, parameters[norm + "weight"], parameters[norm + "bias"]);
  }
  x = activated(x, shape);
  return shape.dropout > 0 ? at::dropout(x, shape.dropout, true) : x;
}

}  // namespace

at::Tensor torch_csr(const Csr& a, at::Device device, at::ScalarType type) {
  at::Tensor value = a.value.defined() ? a.value : at::ones({a.entries()}, a.start.options().dtype(at::kFloat));
  if (a.row_scale.defined()) value = value * at::repeat_interleave(a.row_scale, a.start.diff());
  if (a.column_scale.defined()) value = value * a.column_scale.index_select(0, a.column);
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  const bool short_indices = a.entries() <= INT32_MAX;  // MKL's and cuSPARSE's own
  const at::ScalarType index = short_indices ? at::kInt : at::kLong;
  value = value.to(device, type);
  return at::sparse_csr_tensor(a.start.to(device, index), a.column.to(device, index), value, {a.rows, a.columns},
                               value.options().layout(at::kSparseCsr));
}

TorchAdjacency torch_adjacency(const Adjacency& a, at::Device device, Amp amp) {
  const at::ScalarType type = device.is_cuda() ? activation_type(amp) : at::kFloat;
  return {torch_csr(a.matrix, device, type), torch_csr(a.transpose, device, type)};
}

at::Tensor torch_forward(const GraphModel& model, const at::Tensor& input, const TorchAdjacency& a) {
  const GraphShape& shape = model->options().shape;
  const auto parameters = model->named_parameters();
  const auto buffers = model->named_buffers();
  const TorchFunctions torch{[&](const at::Tensor& x) { return spmm(a, x); }, activation_type(model->options().amp)};
  at::Tensor x = input;
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    x = model->convs()[static_cast<size_t>(layer)]->torch_forward(x, torch);
    if (layer + 1 < shape.layers) x = between_layers(x, shape, parameters, buffers, "norms." + std::to_string(layer) + ".");
  }
  return x;
}

}  // namespace satchel::tool
