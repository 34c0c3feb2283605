#include "satchel/autograd/norm.h"

#include <ATen/ops/addcmul.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/mul.h>

#include <algorithm>

#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/autograd/statistics.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

class NormNode : public SavingNode {
 public:
  explicit NormNode(const std::string& layer) : SavingNode("norm", layer) {}

  Norm norm = Norm::batch;
  bool training = true;
  Packed packed;          // the normalised values; x itself where `mean` is kept
  at::Tensor mean, rstd;  // mean: undefined where the normalised values are packed
  SavedVariable weight;   // γ: changing it in place before backward is an error, as in torch

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    if (packed.bytes.defined()) report(packed, layer(), "norm", kept);
    std::vector<int64_t> shape{rstd.numel()};
    if (mean.defined()) shape.insert(shape.begin(), 2);
    const int64_t bytes = static_cast<int64_t>(rstd.nbytes()) * (mean.defined() ? 2 : 1);
    kept.push_back({layer(), "statistics", std::move(shape), 32, bytes, bytes});
    return kept;
  }

 protected:
  variable_list back(at::Tensor g) override {
    at::Tensor gradient = own(std::move(g));
    if (!packed.bytes.defined()) {
      const at::Tensor beta = needs(2) ? gradient.sum(at::IntArrayRef{0}, /*keepdim=*/false, at::kFloat) : at::Tensor();
      return {needs(0) ? gradient.mul_(at::mul(weight.unpack().detach(), rstd.squeeze(0))) : at::Tensor(), {}, beta};
    }
    const SharedSave save{packed, {}, {}, {}, {}, {}};
    const SharedRows rows(save);
    const auto values = [&](int64_t first, int64_t last) {
      at::Tensor x = rows.values(first, last);
      if (!mean.defined()) return x;
      const bool by_row = norm == Norm::layer;
      const auto part = [&](const at::Tensor& s) { return by_row ? s.narrow(0, first, last - first) : s; };
      return x.sub_(part(mean)).mul_(part(rstd));
    };
    const NormGradients sums = norm_back_(gradient, {norm, training, weight.unpack().detach(), rstd, values}, needs(0),
                                          [&](const auto& run) { rows.for_stretches(run); });
    return {needs(0) ? gradient : at::Tensor(), sums.gamma, sums.beta};
  }

  void release() override {
    packed = {};
    mean.reset();
    rstd.reset();
    weight.reset_data();
  }
};

at::Tensor apply_norm(const at::Tensor& x, const NormWeights& weights, Norm norm, const NormOptions& options, const Saving& saving,
                      const char* op) {
  check_norm(x, weights, norm, options, op);
  if (saving.method.plain || !records(x, weights.gamma, weights.beta)) {
    // torch's batch_norm takes float32 weights with bfloat16 rows; its layer_norm on CUDA does not.
    const auto as_x = [&](const at::Tensor& w) { return w.to(x.scalar_type()); };
    if (norm == Norm::layer) return at::layer_norm(x, {x.size(1)}, as_x(weights.gamma), as_x(weights.beta), options.eps);
    return at::batch_norm(x, weights.gamma, weights.beta, weights.running_mean, weights.running_var, options.training, options.momentum,
                          options.eps, /*cudnn_enabled=*/true);
  }
  const auto node = make_node<NormNode>(saving.name, x, weights.gamma, weights.beta);
  const at::Tensor rows = x.detach().contiguous();
  const Statistics s = statistics_of(rows, weights, norm, options);
  const at::Tensor values = normalised(rows, s);
  node->norm = norm;
  node->training = options.training;
  node->rstd = s.rstd;
  node->weight = SavedVariable(weights.gamma, /*is_output=*/false);
  const CodecSpec spec = norm_spec(saving.method, x.size(1));
  const bool reads_values = options.training || norm == Norm::layer || weights.gamma.requires_grad();
  if (!reads_values) {
    // Running statistics are constants: the gradient of x reads γ and the deviation only.
  } else if (saving.method.shared) {
    node->packed = pack(values, spec, fresh_seed(x.device()));
  } else {
    node->packed = pack(rows, spec, fresh_seed(x.device()));
    node->mean = s.mean.is_view() ? s.mean.clone() : s.mean;  // not a view of running statistics, which change
  }
  return attach(at::addcmul(weights.beta.detach(), values, weights.gamma.detach()).to(x.scalar_type()), node);
}

}  // namespace

at::Tensor batch_norm(const at::Tensor& x, const NormWeights& weights, const NormOptions& options, const Saving& saving) {
  return apply_norm(x, weights, Norm::batch, options, saving, "batch_norm");
}

at::Tensor layer_norm(const at::Tensor& x, const NormWeights& weights, const NormOptions& options, const Saving& saving) {
  return apply_norm(x, weights, Norm::layer, options, saving, "layer_norm");
}

}  // namespace satchel
