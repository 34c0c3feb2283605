#include "satchel/autograd/norm_low_pass.h"

#include <ATen/ops/empty_like.h>

#include "satchel/autograd/input.h"
#include "satchel/autograd/map_rows.h"
#include "satchel/autograd/node.h"
#include "satchel/tensor/norm_block.h"
#include "satchel/tensor/norm_low_pass.h"

namespace satchel {
namespace {

class NormLowPassNode : public SavingNode {
 public:
  explicit NormLowPassNode(const std::string& layer) : SavingNode("norm_low_pass", layer) {}

  NormLowPassSave save;
  bool has_skip = false;
  SavedVariable weight;  // γ: changing it in place before backward is an error, as in torch

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    report(save.code, layer(), "norm", kept);
    const at::Tensor& rstd = save.moments.rstd;
    const int64_t bytes = 2 * static_cast<int64_t>(rstd.nbytes());
    kept.push_back({layer(), "statistics", {2, rstd.numel()}, 32, bytes, bytes});
    if (save.on.defined()) kept.push_back({layer(), "mask", save.code.shape, 1, save.on.numel(), save.on.numel() * 8});
    return kept;
  }

 protected:
  /// In the order of the inputs: x, γ, β and, where there is one, skip.
  variable_list back(at::Tensor g) override {
    const at::Tensor gradient = map_of_rows(for_kernels(own_rows(std::move(g))), save.code.shape);
    const NormActSums sums = norm_low_pass_sums(gradient, save);
    const bool to_x = needs(0), to_skip = has_skip && needs(3);
    at::Tensor dx;
    if (to_x) dx = to_skip ? at::empty_like(gradient) : gradient;
    if (to_x || to_skip) norm_low_pass_back_(gradient, dx, save, weight.unpack().detach(), sums);
    variable_list result{dx, sums.gamma, sums.beta};
    if (has_skip) result.push_back(to_skip ? gradient : at::Tensor());
    return result;
  }

  void release() override {
    save = {};
    weight.reset_data();
  }
};

/// In channels_last order from a multiple of 16 bytes on, without a history: a view or a copy.
at::Tensor for_map_kernels(const at::Tensor& x) { return map_of_rows(for_kernels(rows_of_map(x.detach())), x.sizes()); }

}  // namespace

bool fuses_norm_low_pass(const at::Tensor& x, const NormWeights& w, const NormActOptions& options, const Saving& saving,
                         const at::Tensor& skip) {
  const bool relus = options.activation == Activation::relu, none = options.activation == Activation::none && !skip.defined();
  if (options.norm != Norm::batch || !(relus || none) || !options.training() || !x.is_cuda() || !is_map(x)) return false;
  if (saving.method.plain || saving.method.shared || saving.method.adaptive || !w.gamma.defined() || !w.beta.defined()) return false;
  if (skip.defined() ? skip.scalar_type() != x.scalar_type() || !records(x, w.gamma, w.beta, skip) : !records(x, w.gamma, w.beta)) {
    return false;
  }
  return fuses_norm_low_pass(x, norm_spec(saving.method, x.size(1), 0));
}

at::Tensor norm_low_pass(const at::Tensor& x, const NormWeights& w, const NormActOptions& options, const Saving& saving,
                         const at::Tensor& into, const at::Tensor& skip) {
  const NoAutocast no_autocast;
  const at::Tensor own = for_map_kernels(x);
  const bool same_memory = into.defined() && into.const_data_ptr() == own.const_data_ptr();  // not where for_kernels() made a copy
  const NormOptions& s = options.statistics;
  const NormLowPassCall call{w.gamma.detach(),
                             w.beta.detach(),
                             w.running_mean,
                             w.running_var,
                             s.eps,
                             s.momentum,
                             options.activation == Activation::relu,
                             skip.defined() ? for_map_kernels(skip) : skip};
  const auto node = skip.defined() ? make_node<NormLowPassNode>(saving.name, x, w.gamma, w.beta, skip)
                                   : make_node<NormLowPassNode>(saving.name, x, w.gamma, w.beta);
  NormLowPassResult result =
      norm_low_pass_encode(own, call, norm_spec(saving.method, x.size(1), 0), fresh_seed(x.device()), same_memory ? own : at::Tensor());
  node->save = std::move(result.save);
  node->has_skip = skip.defined();
  node->weight = SavedVariable(w.gamma, /*is_output=*/false);
  return attach(result.z, node);
}

}  // namespace satchel
