#include "satchel/autograd/norm_chain.h"

#include "satchel/autograd/input.h"
#include "satchel/autograd/map_rows.h"
#include "satchel/autograd/node.h"
#include "satchel/tensor/norm_block.h"

namespace satchel {
namespace {

class NormChainNode : public SavingNode {
 public:
  explicit NormChainNode(const std::string& layer) : SavingNode("norm_chain", layer) {}

  NormBlockSave save;
  SavedVariable weight;  // γ: changing it in place before backward is an error, as in torch

  std::vector<SavedTensor> lines() const override {
    std::vector<SavedTensor> kept;
    report(save.code, layer(), "norm", kept);
    const at::Tensor& rstd = save.moments.rstd;
    const int64_t bytes = 2 * static_cast<int64_t>(rstd.nbytes()), values = save.code.shape[0] * save.code.shape[1];
    kept.push_back({layer(), "statistics", {2, rstd.numel()}, 32, bytes, bytes});
    kept.push_back({layer(), "mask", save.code.shape, 1, save.on.numel(), values});
    if (save.kept.defined()) kept.push_back({layer(), "dropout", save.code.shape, 1, save.kept.numel(), values});
    if (save.seed.defined()) kept.push_back(saved_line(layer(), "seed", save.seed));
    return kept;
  }

 protected:
  variable_list back(at::Tensor g) override {
    const at::Tensor gradient = for_kernels(own(std::move(g)));
    const NormActSums sums = norm_block_sums(gradient, save);
    if (needs(0)) norm_block_back_(gradient, save, weight.unpack().detach(), sums);
    return {needs(0) ? gradient : at::Tensor(), sums.gamma, sums.beta};
  }

  void release() override {
    save = {};
    weight.reset_data();
  }
};

}  // namespace

bool fuses_norm_chain(const at::Tensor& x, const NormWeights& w, const NormActOptions& options, const Saving& saving) {
  const bool right_kind = options.norm == Norm::batch && options.activation == Activation::relu && options.training();
  if (!right_kind || saving.method.plain || saving.method.shared || !x.is_cuda() || !records(x, w.gamma, w.beta)) return false;
  if (!w.gamma.defined() || !w.beta.defined() || x.numel() == 0 || codes_normalised_rows(saving.method)) return false;  // codes x
  return !is_map(x) && fuses_norm_block(x, norm_spec(saving.method, x.size(1), 0));
}

at::Tensor norm_chain(const at::Tensor& x, const NormWeights& w, const NormActOptions& options, const Saving& saving,
                      const at::Tensor& into) {
  const NoAutocast no_autocast;
  const at::Tensor rows = for_kernels(x.detach());
  const bool same_memory = into.defined() && into.const_data_ptr() == rows.const_data_ptr();  // not where for_kernels() made a copy
  const NormOptions& s = options.statistics;
  const ColumnMoments moments = column_moments(rows, w.running_mean, w.running_var, s.eps, s.momentum);
  const auto node = make_node<NormChainNode>(saving.name, x, w.gamma, w.beta);
  NormBlockSeeds seeds;
  seeds.code = fresh_seed(x.device());
  if (options.dropout > 0) seeds.dropout = fresh_seed(x.device());
  NormBlockResult result = norm_block_encode(rows, moments, w.gamma.detach(), w.beta.detach(), norm_spec(saving.method, x.size(1), 0),
                                             seeds, options.dropout, saving.method.keeps_dropout, same_memory ? into : at::Tensor());
  node->save = std::move(result.save);
  node->weight = SavedVariable(w.gamma, /*is_output=*/false);
  return attach(result.z, node);
}

}  // namespace satchel
